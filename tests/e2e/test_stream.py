"""How a Responses stream arrives: whole events, at once, in order, with a prompt end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.captures import corrected, load
from tests.e2e.wire import connect, post_stream
from tests.fake_scripts import EVENT_STREAM, play, stream, vllm_events
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import FakeVllm

TRUNCATED = load("0.32.0", "a1_stream_truncated")


async def test_every_chunk_downstream_holds_whole_events(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """Some parsers reset at every chunk, so an event is never spread over two of ours."""
    proxy = await lastword()
    for step in (1, 7, 100, 1000):
        fake.script(play(TRUNCATED, cuts=range(step, len(TRUNCATED.body), step)))
        answer = await post_stream(proxy.url)
        assert answer.body == corrected(TRUNCATED.body)
        assert all(chunk.endswith(b"\n\n") for chunk in answer.chunks)


async def test_each_event_arrives_before_the_next_is_sent(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """The head goes down before the first event, and each event when it is whole."""
    proxy = await lastword()
    events = vllm_events(deltas=10)
    fake.script(stream(events, gated=True))
    async with connect(proxy.url) as wire:
        await wire.post()
        answer = await wire.head()
        assert answer.status == 200
        for number, sent in enumerate(events[:-1]):
            fake.gate(str(number)).open()
            assert await wire.event() == sent
        fake.gate(str(len(events) - 1)).open()
        assert await wire.event() == corrected(events[-1])
        fake.gate("ending").open()
        assert await wire.chunk() == b""


async def test_two_events_in_one_write_arrive_together(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """What came in one piece goes on in one piece, the terminal event among it."""
    proxy = await lastword()
    first, second, *middle, last = vllm_events()
    pieces = [first + second, b"".join(middle) + last]
    fake.script(stream(pieces, gated=True))
    async with connect(proxy.url) as wire:
        await wire.post()
        await wire.head()
        fake.gate("0").open()
        assert await wire.chunk() == first + second
        fake.gate("1").open()
        assert await wire.chunk() == b"".join(middle) + corrected(last)


async def test_half_an_event_is_held_until_it_is_whole(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """A whole event goes on at once although half of the next one came with it."""
    proxy = await lastword()
    events = vllm_events()
    half = len(events[1]) // 2
    pieces = [events[0] + events[1][:half], events[1][half:] + b"".join(events[2:])]
    fake.script(stream(pieces, gated=True))
    async with connect(proxy.url) as wire:
        await wire.post()
        await wire.head()
        fake.gate("0").open()
        assert await wire.event() == events[0]
        fake.gate("1").open()
        assert (await wire.chunk()).startswith(events[1])


@pytest.mark.parametrize("together", [True, False])
async def test_done_after_the_terminal_event_passes(
    together: bool,  # noqa: FBT001 -- a parameter of the test
    fake: FakeVllm,
    lastword: StartLastword,
) -> None:
    """A [DONE] that upstream sends after the last event goes on to the client."""
    proxy = await lastword()
    events, done = vllm_events(), b"data: [DONE]\n\n"
    pieces = [*events[:-1], events[-1] + done] if together else [*events, done]
    fake.script(stream(pieces))
    answer = await post_stream(proxy.url)
    assert answer.body == corrected(b"".join(events)) + done


async def test_upstream_that_stays_open_after_done_is_let_go(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """Neither the terminal event nor [DONE] leaves a connection to upstream open for ever."""
    proxy = await lastword()
    for tail in ([], [b"data: [DONE]\n\n"]):
        fake.script(stream([b"".join([*vllm_events(), *tail])], ending="hang"))
        answer = await post_stream(proxy.url)
        assert answer.ending == "clean"
        await (await fake.exchange(len(fake.exchanges) - 1)).until_closed()


async def test_stream_ends_although_upstream_stays_open(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """SDKs wait for EOF, so it comes soon after the terminal event; upstream is let go."""
    proxy = await lastword()
    events = vllm_events()
    fake.script(stream(events, ending="hang"))
    async with connect(proxy.url) as wire:
        await wire.post()
        answer = await wire.answer()
        assert answer.body == corrected(b"".join(events))
        assert answer.ending == "clean"
        await (await fake.exchange()).until_closed()


async def test_upstream_that_is_cut_after_the_terminal_event_ended_well(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """Once the terminal event is there the stream is whole, whatever becomes of the connection."""
    proxy = await lastword()
    events = vllm_events()
    for ending in ("cut", "reset"):
        fake.close_gates()
        fake.script(stream(events, gated=True, ending=ending))
        async with connect(proxy.url) as wire:
            await wire.post()
            answer = await wire.head()
            for number in range(len(events)):
                fake.gate(str(number)).open()
            answer.chunks += [await wire.chunk() for _ in events]
            fake.gate("ending").open()
            await wire.body(answer)
        assert answer.body == corrected(b"".join(events))
        assert answer.ending == "clean"


async def test_body_that_ends_with_its_connection(fake: FakeVllm, lastword: StartLastword) -> None:
    """A body without length or chunks is framed by EOF upstream and in chunks downstream."""
    proxy = await lastword()
    events = vllm_events()
    fake.script(stream(events, headers=[*EVENT_STREAM, ("connection", "close")], ending="eof"))
    answer = await post_stream(proxy.url)
    assert answer.body == corrected(b"".join(events))
    assert answer.ending == "clean"


async def test_body_with_a_length(fake: FakeVllm, lastword: StartLastword) -> None:
    """A length that upstream gave does not survive: the corrected name is one byte longer."""
    proxy = await lastword()
    body = b"".join(vllm_events())
    fake.script(stream([body], headers=[*EVENT_STREAM, ("content-length", str(len(body)))]))
    answer = await post_stream(proxy.url)
    assert answer.body == corrected(body)
    assert answer.values("content-length") == []


async def test_two_streams_on_one_connection(fake: FakeVllm, lastword: StartLastword) -> None:
    """A stream that ended well leaves its connections for the next one, on both sides."""
    proxy = await lastword()
    events = vllm_events()
    fake.handler = stream(events)
    async with connect(proxy.url) as wire, asyncio.timeout(PATIENCE_S):
        for _ in range(3):
            await wire.post()
            assert (await wire.answer()).body == corrected(b"".join(events))
    assert fake.connections == 1
