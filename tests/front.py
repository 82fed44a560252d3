"""What stands before the proxy: a real nginx or Envoy, started for one test."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tests.captures import corrected
from tests.e2e.wire import connect
from tests.fake_scripts import stream, vllm_events
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.e2e.wire import Answer, Wire
    from tests.fake_vllm import FakeVllm

__all__ = ["assert_events_arrive_promptly", "free_port", "listening", "read_until"]


def free_port() -> int:
    """Return a loopback port that nobody listens on just now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@asynccontextmanager
async def listening(port: int, *command: str) -> AsyncIterator[None]:
    """Run a server while the block runs, which begins when the server's port is open."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await _until_it_listens(port, process, command[0])
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            await process.wait()


async def read_until(wire: Wire, answer: Answer, ending: bytes) -> None:
    """Read chunks, which are the front's own, until the body ends so."""
    while not answer.body.endswith(ending):
        chunk = await wire.chunk()
        assert chunk, f"the body ended: {answer.body!r}"
        answer.chunks.append(chunk)


async def assert_events_arrive_promptly(fake: FakeVllm, url: str) -> None:
    """Check that each event is with the client before the next is sent, corrected, and no more."""
    events = vllm_events()
    fake.script(stream(events, gated=True))
    sent = corrected(b"".join(events))
    async with connect(url) as wire:
        await wire.post()
        answer = await wire.head()
        assert answer.status == 200
        for number, event in enumerate(events):
            fake.gate(str(number)).open()
            last = number == len(events) - 1
            await read_until(wire, answer, sent[-200:] if last else event)
        fake.gate("ending").open()
        await wire.body(answer)
    assert (answer.body, answer.ending) == (sent, "clean")


async def _until_it_listens(port: int, process: asyncio.subprocess.Process, name: str) -> None:
    async with asyncio.timeout(2 * PATIENCE_S):
        while True:
            assert process.returncode is None, f"{name} ended; its log says why"
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                await writer.wait_closed()
                return
