"""Signs of life on a silent stream."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.captures import corrected
from tests.e2e.wire import RESPONSES, connect
from tests.fake_responses_api import FakeResponsesApi
from tests.fake_scripts import EVENT_STREAM, stream, vllm_events

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import Exchange, FakeVllm

EVENTS = vllm_events()
COMMENT = b": keep-alive\n\n"
KEEPALIVE = b'event: keepalive\ndata: {"type":"keepalive"}\n\n'
BEAT_S = 0.05


async def test_comment_between_events(fake: FakeVllm, lastword: StartLastword) -> None:
    """A silent upstream lets a comment pass before and between events; all else is identical."""
    proxy = await lastword(heartbeat_s=BEAT_S)
    fake.script(stream(EVENTS, gated=True))
    events = []
    async with connect(proxy.url) as wire:
        await wire.post()
        answer = await wire.head()
        assert await wire.chunk() == COMMENT
        for number in range(len(EVENTS)):
            fake.gate(str(number)).open()
            while (chunk := await wire.chunk()) == COMMENT:
                pass
            events.append(chunk)
            if number < len(EVENTS) - 1:
                assert await wire.chunk() == COMMENT
        fake.gate("ending").open()
        await wire.body(answer)
    assert answer.body == b""  # none behind the terminal event
    assert b"".join(events) == corrected(b"".join(EVENTS))


async def test_never_within_an_event(fake: FakeVllm, lastword: StartLastword) -> None:
    """A half event is held until it is whole; a heartbeat may pass before it, never inside it."""
    proxy = await lastword(heartbeat_s=BEAT_S)
    half, rest = EVENTS[1][:40], EVENTS[1][40:]
    fake.script(stream([EVENTS[0], half, rest, *EVENTS[2:]], gated=True))
    for number in range(2):
        fake.gate(str(number)).open()
    async with connect(proxy.url) as wire:
        await wire.post()
        await wire.head()
        while (chunk := await wire.chunk()) == COMMENT:
            pass
        assert chunk == EVENTS[0]
        assert await wire.chunk() == COMMENT
        assert await wire.chunk() == COMMENT
        fake.gate("2").open()
        while (chunk := await wire.chunk()) == COMMENT:
            pass
        assert chunk == EVENTS[1]


async def test_never_within_an_overlong_event(fake: FakeVllm, lastword: StartLastword) -> None:
    """While a long event passes in parts nothing is written between them."""
    proxy = await lastword(heartbeat_s=BEAT_S, max_event_bytes=1000)
    long = b"data: " + b"x" * 3000 + b"\n\n"
    fake.script(stream([EVENTS[0], long[:2000], long[2000:]], gated=True, ending="hang"))
    for number in range(2):
        fake.gate(str(number)).open()
    async with connect(proxy.url) as wire:
        await wire.post()
        await wire.head()
        body = await wire.chunk()
        while not body.endswith(b"xxx"):
            body += await wire.chunk()
        # Ten beats' time without a beat: the other stream's beats are the clock.
        fake.script(stream(EVENTS[:1], ending="hang"))
        async with connect(proxy.url) as clock:
            await clock.post()
            await clock.head()
            beats = 0
            while beats < 10:
                beats += await clock.chunk() == COMMENT
        fake.gate("2").open()
        tail = await wire.chunk()
        while not tail.endswith(b"\n\n"):
            tail += await wire.chunk()
        assert (body + tail).removesuffix(COMMENT) == EVENTS[0] + long


async def test_no_blank_line_after_an_id(fake: FakeVllm, lastword: StartLastword) -> None:
    """Once an id field was seen the comment has no blank line: openai-python trips over it."""
    proxy = await lastword(heartbeat_s=BEAT_S)
    fake.script(stream([EVENTS[0].replace(b"data:", b"id: 1\ndata:")], ending="hang"))
    async with connect(proxy.url) as wire:
        await wire.post()
        await wire.head()
        await wire.chunk()
        assert await wire.chunk() == b": keep-alive\n"


async def test_keepalive_event(fake: FakeVllm, lastword: StartLastword) -> None:
    """Kind event waits for response.created, then sends events that Codex counts."""
    proxy = await lastword(heartbeat_s=BEAT_S, heartbeat_kind="event")
    fake.script(stream(EVENTS[:2], gated=True, ending="hang"))
    async with connect(proxy.url) as wire:
        await wire.post()
        await wire.head()
        fake.gate("0").open()
        assert await wire.chunk() == EVENTS[0]
        assert await wire.chunk() == KEEPALIVE


@pytest.mark.parametrize("mode", ["observe", "off"])
async def test_untouched_streams_have_none(
    mode: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Without correction nothing of the proxy's own is sent."""
    proxy = await lastword(heartbeat_s=BEAT_S, correct=mode)

    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(200, EVENT_STREAM)
        await exchange.send(EVENTS[0])
        await exchange.gate("more")
        await exchange.send(EVENTS[1])
        await exchange.wait_closed()

    fake.script(script)
    corrected_proxy = await lastword(heartbeat_s=BEAT_S)
    async with connect(proxy.url) as wire:
        await wire.post()
        await wire.head()
        assert await wire.chunk() == EVENTS[0]
        fake.script(stream(EVENTS[:1], ending="hang"))
        async with connect(corrected_proxy.url) as clock:
            await clock.post()
            await clock.head()
            assert await clock.chunk() == EVENTS[0]
            for _ in range(5):
                assert await clock.chunk() == COMMENT
        fake.gate("more").open()
        assert await wire.chunk() == EVENTS[1]


async def test_followers_get_them_and_copies_do_not(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """A follower of a silent run is kept alive; the replay holds no heartbeat."""
    api = FakeResponsesApi(fake, gated=True)
    proxy = await lastword(heartbeat_s=BEAT_S, background="upstream")
    body = json.dumps({"stream": True, "background": True, "request_id": "r"}).encode()
    seen = b""
    async with connect(proxy.url) as wire:
        await wire.post(body)
        await fake.until(lambda: "r" in api.runs)
        api.step("r", 1)
        answer = await wire.head()
        while not seen.endswith(COMMENT):
            seen += await wire.chunk()
        api.step("r", 100)
        await wire.body(answer)
    assert answer.ending == "clean"
    async with connect(proxy.url) as wire:
        await wire.request("GET", f"{RESPONSES}/r?stream=true")
        replay = await wire.answer()
    assert COMMENT not in replay.body
    assert replay.body == (seen + answer.body).replace(COMMENT, b"")
