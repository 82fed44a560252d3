"""Open files run out before anything else does: said at start, told as 503, survived."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from tests.e2e.wire import Cut, connect, exchange, post_stream
from tests.fake_scripts import stream, vllm_events
from tests.soak.process import running_proxy
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import StartLastword
    from tests.e2e.wire import Wire
    from tests.fake_vllm import FakeVllm

IDLE = 300
OPEN_FILES = 120
CLIENTS = 70
WARNING = "the limit of open files"
USED_UP = "connections are closed at once"


async def test_open_files_run_out(fake: FakeVllm, tmp_path: Path) -> None:
    """Beyond the limit streams are 503 or find nobody; open ones go on, and so does the proxy."""
    fake.handler = stream(vllm_events(), gated=True)
    settings = {"background": "pass", "heartbeat_s": 0}
    async with (
        running_proxy(fake.port, tmp_path / "log", settings, open_files=OPEN_FILES) as proxy,
        AsyncExitStack() as clients,
    ):
        [warning] = [line for line in proxy.log() if line["event"].startswith(WARNING)]
        assert (warning["open_files"], warning["streams"], warning["wanted"]) == (120, 28, 4096)
        fake.gate("0").open()
        served, refused = [], 0
        for _ in range(CLIENTS):
            wire = await clients.enter_async_context(connect(proxy.url))
            try:
                await wire.post()
                head = await wire.head()
            except (Cut, ConnectionError):
                refused += 1
                continue
            if head.status == 200:
                served.append(wire)
            else:
                assert head.status == 503, head
                assert head.values("retry-after") == [b"1"]
                refused += 1
        assert len(served) >= warning["streams"]
        assert refused
        for number in range(1, 12):
            fake.gate(str(number)).open()
        fake.gate("ending").open()
        for wire in served:
            assert b"event: response.incomplete\n" in await _rest(wire)
        await clients.aclose()
        async with asyncio.timeout(PATIENCE_S):
            while True:  # its sockets are closed one after another
                try:
                    if (await post_stream(proxy.url)).status == 200:
                        break
                except (Cut, ConnectionError):
                    await asyncio.sleep(0.05)
        assert await proxy.terminate() == 0


async def test_idle_connections_leave_the_admin_port_open(fake: FakeVllm, tmp_path: Path) -> None:
    """Files for an operator's eyes are kept, and the log says why clients are turned away."""
    settings = {"background": "pass", "ready_needs_upstream": False}
    async with (
        running_proxy(fake.port, tmp_path / "log", settings, open_files=OPEN_FILES) as proxy,
        AsyncExitStack() as clients,
    ):
        for _ in range(2 * OPEN_FILES):
            await clients.enter_async_context(connect(proxy.url))
        async with asyncio.timeout(PATIENCE_S):
            while not any(line["event"].startswith(USED_UP) for line in proxy.log()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await exchange(proxy.admin_url, "GET", "/livez")).status == 200
        await clients.aclose()
        assert await proxy.terminate() == 0


async def test_enough_open_files_are_no_warning(fake: FakeVllm, tmp_path: Path) -> None:
    """What ``max_streams`` allows fits: nothing is said."""
    settings = {"background": "pass", "max_streams": 28, "ready_needs_upstream": False}
    async with running_proxy(fake.port, tmp_path / "log", settings, open_files=OPEN_FILES) as proxy:
        assert not [line for line in proxy.log() if line["event"].startswith(WARNING)]


async def test_idle_streams_leave_it_answering(fake: FakeVllm, lastword: StartLastword) -> None:
    """Hundreds of streams that say nothing, and the next request is served as ever."""
    proxy = await lastword()
    fake.handler = stream(vllm_events(), gated=True)
    fake.gate("0").open()
    async with AsyncExitStack() as clients:
        for _ in range(IDLE):
            wire = await clients.enter_async_context(connect(proxy.url))
            await wire.post()
            await wire.head()
            await wire.chunk()
        fake.script(stream(vllm_events()))
        got = await post_stream(proxy.url)
        assert (got.status, got.ending) == (200, "clean")


async def _rest(wire: Wire) -> bytes:
    chunks = []
    while chunk := await wire.chunk():
        chunks.append(chunk)
    return b"".join(chunks)
