"""The benchmark's loads, small, on the real proxy: they must not rot between runs."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from proxy.gateway.server import running
from proxy.settings import load_settings
from tests.bench.load import load
from tests.bench.plans import Burst, Held, LargeEvent, Order, Paced, Plan, Replay, Requests, Where
from tests.bench.upstream import listen
from tests.bench.vllm_events import RESPONSE_EVENTS_AROUND

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PLANS: dict[str, tuple[Plan, dict[str, int]]] = {
    "paced": (Paced(streams=3, rate=50, seconds=0.1), {"response.incomplete": 3}),
    "chat": (Paced(streams=3, rate=50, seconds=0.1, chat=True), {"chat.completion.chunk": 3}),
    "burst": (Burst(streams=3, events=50), {"response.incomplete": 3}),
    "held": (Held(few=1, many=2), {"response.incomplete": 2}),
    "large": (
        LargeEvent(streams=2, rate=50, seconds=0.2, large_bytes=1_000_000),
        {"response.incomplete": 3},
    ),
    "requests": (Requests(connections=3, seconds=0.1), {}),
    "replay": (Replay(events=50, reads=2), {"response.incomplete": 3}),
}


@asynccontextmanager
async def place(*, proxied: bool, background: bool = False) -> AsyncIterator[Where]:
    """Serve the benchmark's upstream, and the proxy before it if asked for, in this process."""
    async with AsyncExitStack() as stack:
        upstream = await listen()
        stack.callback(upstream.close)
        upstream_port = port = upstream.sockets[0].getsockname()[1]
        if proxied:
            settings = load_settings(
                upstream=f"http://127.0.0.1:{port}", port=0, admin_port=0, background="proxy"
            )
            proxy = await stack.enter_async_context(running(settings))
            port = int(proxy.url.rpartition(":")[2])
        core = min(os.sched_getaffinity(0))
        yield Where(
            port=port,
            upstream_port=upstream_port,
            upstream_pid=os.getpid(),
            server_pids=[os.getpid()],
            server_core=core,
            load_core=core,
            limit_s=20,
            background=background,
        )


@pytest.mark.parametrize("name", PLANS)
async def test_nothing_is_lost_and_every_stream_ends_right(name: str) -> None:
    """Through the proxy each load gets all events, the corrected ones among them."""
    plan, endings = PLANS[name]
    async with place(proxied=True, background=isinstance(plan, Replay)) as where:
        ordered = load(Order(where, plan))
        await ordered.run()
        report = ordered.report()
    assert (report.lost, report.last_events) == (0, endings)


async def test_without_a_proxy_the_upstream_ends_as_vllm_does() -> None:
    """Else a corrected event would say nothing."""
    async with place(proxied=False) as where:
        ordered = load(Order(where, Burst(streams=3, events=50)))
        await ordered.run()
        report = ordered.report()
    assert (report.lost, report.last_events) == (0, {"response.completed": 3})
    assert report.work == 3 * (50 + RESPONSE_EVENTS_AROUND)


async def test_silent_streams_wait_for_their_release() -> None:
    """Each delta and what follows it come after the look at memory, not before."""
    async with place(proxied=True) as where:
        ordered = load(Order(where, Held(few=2, many=5)))
        await ordered.run()
    assert ordered.report().work == 5 * 5


async def test_what_does_not_come_is_lost() -> None:
    """A load that is broken off tells how much is missing."""
    async with place(proxied=False) as where:
        ordered = load(Order(where, Burst(streams=1, events=50)))
        run = asyncio.ensure_future(ordered.run())
        await asyncio.sleep(0)  # it has begun, and nothing can have come
        run.cancel()
        await asyncio.wait([run])
    assert ordered.report().lost == 50 + RESPONSE_EVENTS_AROUND
