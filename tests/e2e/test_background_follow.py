"""Followers of a background response: joining, leaving, reading slowly, coming back."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, cast

import pytest

from tests.e2e.background import (
    MODES,
    Follower,
    asked,
    blocks,
    create,
    creating,
    expected,
    following,
    get,
    replay,
)
from tests.e2e.wire import connect
from tests.fake_responses_api import FakeResponsesApi
from tests.fake_scripts import event, response_object, stream, vllm_events
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

    from proxy.background.run import Run
    from proxy.gateway.server import Running
    from tests.conftest import Lastword, StartLastword
    from tests.fake_scripts import Ending
    from tests.fake_vllm import FakeVllm

SLOW_BYTES = 8192


def run_of(proxy: Lastword) -> Run:
    """Look at the one run that the proxy makes now."""
    runs = cast("Running", proxy).gateway.runs
    assert runs is not None
    (maker,) = runs._makers.by_key.values()
    return maker.run


@pytest.mark.parametrize("mode", MODES)
async def test_reconnect_at_every_index(mode: str, fake: FakeVllm, lastword: StartLastword) -> None:
    """From any cursor a follower gets the rest, byte for byte, while it is made and after."""
    proxy = await lastword(background=mode)
    api = FakeResponsesApi(fake, gated=True)
    whole = expected("incomplete", deltas=2)
    half = len(whole) // 2
    async with AsyncExitStack() as stack:
        creator = await stack.enter_async_context(
            creating(proxy.url, gated=fake, max_output_tokens=2)
        )
        api.step("resp_1", half - 1)
        await creator.read(half)
        followers = [
            await stack.enter_async_context(following(proxy.url, after))
            for after in range(-1, len(whole) + 1)
        ]
        for after in range(-1, half - 1):
            await followers[after + 1].read(half - 1 - after)
        api.step("resp_1", 100)
        assert await creator.rest() == whole
        for after, follower in enumerate(followers, -1):
            assert await follower.rest() == whole[after + 1 :], after
            assert follower.ending == "clean"
    for after in range(-1, len(whole) + 1):
        assert blocks((await replay(proxy.url, after)).body) == whole[after + 1 :], after
    assert len(fake.requests) == 1


async def test_followers_that_join_at_random_moments(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """Ten join anywhere, one of them while the terminal event is half there: all get the same."""
    proxy = await lastword(background="proxy")
    events = vllm_events("incomplete", deltas=8)
    whole = expected("incomplete", deltas=8)
    half = len(events[-1]) // 2
    pieces = [*events[:-1], events[-1][:half], events[-1][half:]]
    chance = random.Random(7)
    joins = sorted([len(pieces) - 1, *(chance.randrange(1, len(pieces)) for _ in range(9))])
    fake.script(stream(pieces, gated=True))
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(connect(proxy.url))
        await wire.post(asked())
        for place in range(len(pieces)):
            if place == 1:
                await wire.head()
                followers = [(-1, Follower(wire))]
            for _ in range(joins.count(place)):
                after = chance.randrange(-1, place + 2)
                joined = await stack.enter_async_context(following(proxy.url, after))
                followers.append((after, joined))
            fake.gate(str(place)).open()
            await fake.gate(str(place + 1) if place + 1 < len(pieces) else "ending").arrived()
        fake.gate("ending").open()
        assert len(followers) == 11
        for after, follower in followers:
            assert await follower.rest() == whole[after + 1 :], after
            assert follower.ending == "clean"


async def test_follower_that_stops_reading(
    tmp_path: Path, fake: FakeVllm, lastword: StartLastword
) -> None:
    """It holds up nobody, costs little memory, and reads on later without gap or repeat."""
    proxy = await lastword(background="proxy", store=f"sqlite:{tmp_path / 'copies.db'}")
    created, progress, *_ = vllm_events(background=True)
    filler = "x" * 4000
    many = [event("response.output_text.delta", n, delta=filler) for n in range(2, 1500)]
    last = event("response.completed", 1500, response=response_object("completed"))
    chunks = [created, progress, *(b"".join(many[n : n + 10]) for n in range(0, len(many), 10))]
    whole = [created, progress, *many, last.replace(b'"background":false', b'"background":true')]
    gate = stream([last], gated=True)

    async def script(exchange: object) -> None:
        await stream(chunks, ending="end")(_Unended(exchange))  # type: ignore[arg-type]
        await gate(_Begun(exchange))  # type: ignore[arg-type]

    fake.script(script)
    async with (
        creating(proxy.url, receive_buffer=SLOW_BYTES) as stuck,
        following(proxy.url, receive_buffer=SLOW_BYTES) as late,
        following(proxy.url) as quick,
    ):
        await late.read(3)
        assert await quick.read(len(whole) - 1) == whole[:-1]
        run = run_of(proxy)
        async with asyncio.timeout(PATIENCE_S):
            while run._tail_bytes > 128 * 1024:  # noqa: ASYNC110 -- until the store has it
                await asyncio.sleep(0.01)
        assert len(run._live) == 1  # the two that are stuck wait for their own sockets
        assert await late.read(len(whole) - 1) == whole[:-1]  # and is live again
        fake.gate("0").open()
        fake.gate("ending").open()
        for follower in (quick, late, stuck):
            assert await follower.rest() == whole
            assert follower.ending == "clean"


class _Unended:
    """An exchange whose answer goes on: the script's end is not sent."""

    def __init__(self, exchange: object) -> None:
        self._exchange = exchange

    def __getattr__(self, name: str) -> object:
        return getattr(self._exchange, name)

    async def end(self) -> None:
        """Do nothing."""


class _Begun(_Unended):
    """An exchange whose head was sent."""

    async def respond(self, *_: object, **__: object) -> None:
        """Do nothing."""

    async def end(self) -> None:
        """End it."""
        await self._exchange.end()  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", MODES)
async def test_run_goes_on_without_its_client(
    mode: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """The client that created a response may leave before its first event, or later."""
    proxy = await lastword(background=mode)
    api = FakeResponsesApi(fake, gated=True)
    for number, events in ((1, 0), (2, 3)):
        response_id = f"resp_{number}"
        async with connect(proxy.url) as wire:
            await wire.post(asked())
            await fake.until(lambda: response_id in api.runs)  # noqa: B023 -- awaited here
            if events:
                api.step(response_id, events)
                await wire.head()
                await Follower(wire).read(events)
            wire.leave()
            await get(proxy.url, response_id="other")  # asked after it left, so it is noticed
        api.step(response_id, 100)
        async with asyncio.timeout(PATIENCE_S):
            while b"completed" not in (await get(proxy.url, response_id=response_id)).body:
                pass
        kept = await replay(proxy.url, response_id=response_id)
        assert blocks(kept.body) == expected(response_id=response_id)


async def test_followers_may_leave(fake: FakeVllm, lastword: StartLastword) -> None:
    """A follower that leaves, in whichever way, changes nothing for the others."""
    proxy = await lastword(background="proxy")
    api = FakeResponsesApi(fake, gated=True)
    async with (
        creating(proxy.url, gated=fake) as creator,
        following(proxy.url) as leaving,
        following(proxy.url) as resetting,
        following(proxy.url) as staying,
    ):
        api.step("resp_1", 2)
        for follower in (creator, leaving, resetting, staying):
            await follower.read(3)
        creator.wire.leave()
        leaving.wire.leave()
        resetting.wire.reset()
        api.step("resp_1", 100)
        assert await staying.rest() == expected()
    assert blocks((await replay(proxy.url)).body) == expected()


async def test_stream_that_upstream_does_not_end(fake: FakeVllm, lastword: StartLastword) -> None:
    """A generation that is cut ends in ``response.failed``, cleanly for followers and replays."""
    proxy = await lastword(background="proxy")
    events = vllm_events(background=True)
    endings: tuple[Ending, ...] = ("cut", "reset", "end")
    for number, ending in enumerate(endings):
        fake.script(stream(events[:6], ending=ending))
        got = await create(proxy.url)
        *before, last = blocks(got.body)
        assert (before, got.ending) == (events[:6], "clean"), number
        assert b'"status":"failed"' in last
        assert b'"code":"server_error"' in last
        assert b'"sequence_number":6' in last
        assert (await replay(proxy.url)).body == got.body
        runs = cast("Running", proxy).gateway.runs
        assert runs is not None
        for key in list(runs.store._ended):  # type: ignore[attr-defined]
            await runs.delete(key)


async def test_lost_stream_is_taken_up_at_vllm(
    monkeypatch: pytest.MonkeyPatch, fake: FakeVllm, lastword: StartLastword
) -> None:
    """In ``upstream`` mode vLLM goes on: the proxy asks for the rest after the last number."""
    monkeypatch.setattr("proxy.background.maker.RETRY_PAUSE_S", 0.01)
    proxy = await lastword(background="upstream")
    events = expected(deltas=9)
    fake.script(
        stream(events[:4], ending="cut"),
        stream(events[4:6], ending="reset"),
        stream([], ending="end"),
        stream([*events[6:-1], events[-1][:20]], ending="cut"),
        stream(events[-1:]),
    )
    assert blocks((await create(proxy.url)).body) == events
    targets = [request.target for request in fake.requests[1:]]
    after = [3, 5, 5, len(events) - 2]
    assert targets == [b"/v1/responses/resp_1?stream=true&starting_after=%d" % n for n in after]
    assert blocks((await replay(proxy.url)).body) == events


async def test_response_that_vllm_has_lost(
    monkeypatch: pytest.MonkeyPatch, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A vLLM that was restarted has it no longer: the run fails, nobody waits for ever."""
    monkeypatch.setattr("proxy.background.maker.RETRY_PAUSE_S", 0.01)
    proxy = await lastword(background="upstream")
    FakeResponsesApi(fake)
    events = vllm_events(background=True)
    fake.script(stream(events[:4], ending="cut"))
    got = await create(proxy.url)
    assert got.ending == "clean"
    assert blocks(got.body)[:-1] == events[:4]
    assert blocks(got.body)[-1].startswith(b"event: response.failed\n")
    assert (await replay(proxy.url)).body == got.body
