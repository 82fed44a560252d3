"""Upstream is lost after the head: the client never takes what it has for the whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.wire import RESPONSES, STREAM, Answer, connect, exchange
from tests.fake_scripts import EVENT_STREAM, Ending, event, response_object, stream, vllm_events

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import Exchange, FakeVllm

EVENTS = vllm_events()
STAGES = {
    # what upstream sends, and how many whole events that is
    "after the head": ([], 0),
    "within created": ([EVENTS[0][:50]], 0),
    "after created": (EVENTS[:1], 1),
    "within an event": ([*EVENTS[:4], EVENTS[4][:30]], 4),
    "between events": (EVENTS[:5], 5),
    "within the terminal event": ([*EVENTS[:-1], EVENTS[-1][:300]], len(EVENTS) - 1),
}
LOSSES = ["cut", "reset", "end"]
"""FIN before the last chunk; RST; a proper end of the body without a terminal event."""


async def lose(fake: FakeVllm, url: str, pieces: list[bytes], whole: int, ending: Ending) -> Answer:
    """Read what upstream sends before it is lost, then lose it, then read the rest."""
    fake.close_gates()
    fake.script(stream(pieces, gated=True, ending=ending))
    async with connect(url) as wire:
        await wire.post()
        answer = await wire.head()
        for number in range(len(pieces)):
            fake.gate(str(number)).open()
        answer.chunks += [await wire.event() for _ in range(whole)]
        await fake.gate("ending").arrived()
        fake.gate("ending").open()
        return await wire.body(answer)


def assert_failed(block: bytes, number: int) -> None:
    """Check the event that the proxy writes itself."""
    name, data = block.removesuffix(b"\n\n").split(b"\n")
    payload: dict[str, Any] = json.loads(data.removeprefix(b"data: "))
    error = payload["response"]["error"]
    assert name == b"event: response.failed"
    assert payload["type"] == "response.failed"
    assert payload["sequence_number"] == number
    assert payload["response"] == response_object("failed") | {"error": error}
    assert error["code"] == "server_error"
    assert error["message"]


@pytest.mark.parametrize("ending", LOSSES)
async def test_failure_is_told_and_then_the_connection_is_cut(
    ending: Ending, fake: FakeVllm, lastword: StartLastword
) -> None:
    """By default response.failed is sent and the cut follows, so that no client overlooks it."""
    proxy = await lastword()
    for stage, (pieces, whole) in STAGES.items():
        answer = await lose(fake, proxy.url, pieces, whole, ending)
        assert answer.chunks[:whole] == EVENTS[:whole], stage
        if whole:
            (failed,) = answer.chunks[whole:]
            assert_failed(failed, whole)
        else:  # no response was created that could have failed
            assert answer.body == b""
        assert answer.ending == "cut", stage


async def test_empty_replay_ends_cleanly(fake: FakeVllm, lastword: StartLastword) -> None:
    """A replay from behind the last event is empty: 200, no bytes, and no cut."""
    proxy = await lastword(background="pass")
    fake.script(stream([]))
    answer = await exchange(proxy.url, "GET", f"{RESPONSES}/resp_1?stream=true&starting_after=99")
    assert (answer.status, answer.body, answer.ending) == (200, b"", "clean")


@pytest.mark.parametrize("ending", LOSSES)
async def test_failure_can_end_cleanly(
    ending: Ending, fake: FakeVllm, lastword: StartLastword
) -> None:
    """With on_lost_upstream=failed a response that was created fails without a cut."""
    proxy = await lastword(on_lost_upstream="failed")
    for stage, (pieces, whole) in STAGES.items():
        answer = await lose(fake, proxy.url, pieces, whole, ending)
        if whole:
            (failed,) = answer.chunks[whole:]
            assert_failed(failed, whole)
        assert answer.ending == ("clean" if whole else "cut"), stage


@pytest.mark.parametrize("ending", LOSSES)
async def test_cut_alone_passes_on_as_a_cut(
    ending: Ending, fake: FakeVllm, lastword: StartLastword
) -> None:
    """With on_lost_upstream=abort the client gets the whole events and the cut, nothing of ours."""
    proxy = await lastword(on_lost_upstream="abort")
    for stage, (pieces, whole) in STAGES.items():
        answer = await lose(fake, proxy.url, pieces, whole, ending)
        assert answer.body == b"".join(EVENTS[:whole]), stage
        assert answer.ending == "cut", stage


async def test_silence_in_mid_stream_is_a_loss(fake: FakeVllm, lastword: StartLastword) -> None:
    """An engine that is stuck ends the stream after upstream_idle_s, and is hung up on."""
    proxy = await lastword(upstream_idle_s=0.3)
    answer = await lose(fake, proxy.url, EVENTS[:5], 5, "hang")
    assert_failed(answer.chunks[5], 5)
    assert answer.ending == "cut"
    await (await fake.exchange()).until_closed()


async def test_cause_that_upstream_told_is_kept(fake: FakeVllm, lastword: StartLastword) -> None:
    """After an error event the failure carries its code and message: some look at it alone."""
    proxy = await lastword()
    error = event("error", 2, code="context_length_exceeded", message="too long", param=None)
    answer = await lose(fake, proxy.url, [*EVENTS[:2], error], 3, "end")
    payload = json.loads(answer.chunks[3].partition(b"data: ")[2])
    assert payload["response"]["error"] == {
        "code": "context_length_exceeded",
        "message": "too long",
    }
    assert payload["sequence_number"] == 3


async def test_no_second_failure_after_upstreams_own(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """A stream that upstream ended in response.failed is whole."""
    proxy = await lastword()
    events = [*EVENTS[:2], event("response.failed", 2, response=response_object("failed"))]
    fake.script(stream(events))
    answer = await exchange(proxy.url, "POST", RESPONSES, body=STREAM)
    assert (answer.body, answer.ending) == (b"".join(events), "clean")


@pytest.mark.parametrize("ending", ["cut", "reset"])
@pytest.mark.parametrize("target", ["/v1/chat/completions", RESPONSES + "/x/cancel"])
async def test_other_streams_are_cut_as_they_were(
    target: str, ending: Ending, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Where the proxy looks at nothing, a cut stays a cut and nothing is added."""
    proxy = await lastword()
    fake.script(stream([b"data: 1\n\n", b"data: hal"], gated=True, ending=ending))
    async with connect(proxy.url) as wire:
        await wire.request("POST", target, body=STREAM)
        answer = await wire.head()
        fake.gate("0").open()
        fake.gate("1").open()
        while answer.body != b"data: 1\n\ndata: hal":
            answer.chunks.append(await wire.chunk())
        fake.gate("ending").open()
        await wire.body(answer)
    assert answer.body == b"data: 1\n\ndata: hal"
    assert answer.ending == "cut"


async def test_body_shorter_than_its_length_is_a_cut(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """A length that is not reached is seen by the client as upstream's proxy saw it."""
    proxy = await lastword()

    async def short(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(200, [("content-length", "10")])
        await exchange.send(b"12345")
        await exchange.cut()

    fake.handler = short
    for target in ("/v1/models", RESPONSES):
        answer = await exchange(proxy.url, "POST", target, body=STREAM)
        assert answer.ending == "cut"


async def test_garbage_in_the_framing_is_a_loss(fake: FakeVllm, lastword: StartLastword) -> None:
    """Chunks that are no chunks break the connection off; nothing of them reaches the client."""
    proxy = await lastword()

    async def broken(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(200, EVENT_STREAM)
        await exchange.send(EVENTS[0])
        await exchange.send_raw(b"zz\r\nevent: response.completed\n\n\r\n")
        await exchange.wait_closed()

    fake.script(broken)
    answer = await exchange(proxy.url, "POST", RESPONSES, body=STREAM)
    assert answer.chunks[0] == EVENTS[0]
    assert_failed(answer.chunks[1], 1)
    assert answer.ending == "cut"
