"""What stands before the proxy: a real nginx or Envoy, started for one test."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.e2e.wire import Answer, Wire

__all__ = ["free_port", "listening", "read_until"]


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
