"""Bytes held and streams open have a limit in all; what is beyond it is told."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.captures import corrected
from tests.e2e.background import api_of, cancel, creating, metric
from tests.e2e.wire import RESPONSES, STREAM, Answer, connect, exchange, post_stream
from tests.fake_responses_api import FakeResponsesApi
from tests.fake_scripts import EVENT_STREAM, echo, stream, vllm_events
from tests.prometheus import total
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import Exchange, FakeVllm

KIB = 1024
MIB = 1024 * KIB
HELD = "lastword_buffered_bytes"
OVERLONG = "lastword_overlong_events_total"
TURNED_AWAY = "lastword_limit_reached_total"


def assert_full(answer: Answer, limit: str) -> None:
    """Check that a request was turned away for now."""
    assert answer.status == 503, answer
    assert answer.values("retry-after") == [b"1"]
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", 503)
    assert limit in error["message"]


async def settled(admin_url: str, name: str, least: float, most: float | None = None) -> None:
    """Wait until a metric has this value, or one between two."""
    most = least if most is None else most
    async with asyncio.timeout(PATIENCE_S):
        while not least <= await metric(admin_url, name) <= most:  # noqa: ASYNC110 - it is asked
            await asyncio.sleep(0.01)


async def test_body_that_finds_no_room_is_503(fake: FakeVllm, lastword: StartLastword) -> None:
    """While one body is half there, another is told to come back; the first is served."""
    proxy = await lastword(max_buffered_bytes=300 * KIB)
    fake.handler = echo
    async with connect(proxy.url) as wire:
        await wire.request("POST", RESPONSES, [("Content-Length", str(250 * KIB))])
        await wire.send(b"x" * 200 * KIB)
        await settled(proxy.admin_url, HELD, 200 * KIB)
        assert_full(await post_stream(proxy.url, b"y" * 150 * KIB), "max_buffered_bytes")
        assert not fake.requests
        await wire.send(b"x" * 50 * KIB)
        assert (await wire.answer()).status == 200
    assert (await post_stream(proxy.url, b"y" * 150 * KIB)).status == 200
    assert await total(proxy.admin_url, TURNED_AWAY, limit="max_buffered_bytes") == 1
    assert await total(proxy.admin_url, TURNED_AWAY) == 1
    assert await metric(proxy.admin_url, HELD) == 0


async def test_body_that_can_never_fit_is_413(fake: FakeVllm, lastword: StartLastword) -> None:
    """To come back would not help.  An upload that is not held passes."""
    proxy = await lastword(max_buffered_bytes=100 * KIB)
    fake.handler = echo
    body = b"x" * 101 * KIB
    assert (await post_stream(proxy.url, body)).status == 413
    assert (await exchange(proxy.url, "POST", "/v1/files", body=body)).status == 200


@pytest.mark.parametrize("background", ["pass", "upstream", "proxy"])
async def test_body_is_let_go_when_the_answer_begins(
    background: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A stream that runs for an hour does not hold its prompt."""
    proxy = await lastword(max_buffered_bytes=300 * KIB, background=background)
    asked: dict[str, Any] = {"input": "x" * 200 * KIB, "background": background != "pass"}
    for response_id in ("resp_1", "resp_2"):
        fake.script(stream(vllm_events(response_id=response_id)[:2], ending="hang"))
    async with creating(proxy.url, **asked):
        assert await metric(proxy.admin_url, HELD) == 0
        async with creating(proxy.url, **asked):
            assert len(fake.requests) == 2


async def test_half_event_without_room_passes_in_parts(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """It arrives before its end has come, is counted, and what follows is corrected as ever."""
    proxy = await lastword(max_buffered_bytes=100 * KIB)
    first, *_, last = vllm_events(status="incomplete")
    half, rest = b"data: " + b"x" * 200 * KIB, b"y\n\n"
    fake.script(stream([first, half, rest, last], gated=True))
    async with connect(proxy.url) as wire:
        await wire.post()
        for number in range(2):
            fake.gate(str(number)).open()
        answer = await wire.head()
        while len(answer.body) < 150 * KIB:
            answer.chunks.append(await wire.chunk())
        for name in ("2", "3", "ending"):
            fake.gate(name).open()
        await wire.body(answer)
    assert answer.body == first + half + rest + corrected(last)
    assert await metric(proxy.admin_url, OVERLONG) == 1
    assert await metric(proxy.admin_url, HELD) == 0


async def test_endless_line_is_held_up_to_its_limit(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """20 MiB without a line end pass; at no time is more than ``max_event_bytes`` held."""
    proxy = await lastword(max_event_bytes=MIB)
    first, *_ = vllm_events()
    part = b"x" * MIB

    async def endless(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(200, EVENT_STREAM)
        await exchange.send(first + part[:-100])
        await exchange.gate("look")
        for _ in range(20):
            await exchange.send(part)
        await exchange.cut()

    fake.script(endless)
    async with connect(proxy.url) as wire:
        await wire.post()
        answer = await wire.head()
        await settled(proxy.admin_url, HELD, MIB)
        fake.gate("look").open()
        await wire.body(answer)
    assert answer.ending == "cut"
    assert answer.body.count(b"xx") * 2 > 21 * MIB - 100 * KIB  # the half event's rest is dropped
    assert b"\n\nevent: response.failed\n" in answer.body
    assert await metric(proxy.admin_url, OVERLONG) == 1
    assert await metric(proxy.admin_url, HELD) == 0


async def test_unread_output_is_counted(fake: FakeVllm, lastword: StartLastword) -> None:
    """What a client does not take counts until it does, or leaves."""
    proxy = await lastword()
    fake.script(stream([b"data: " + b"x" * 16 * MIB + b"\n\n"], ending="hang"))
    async with connect(proxy.url, receive_buffer=4096) as wire:
        await wire.post()
        await wire.head()
        await settled(proxy.admin_url, HELD, 8 * MIB, 20 * MIB)
    await settled(proxy.admin_url, HELD, 0)


@pytest.mark.parametrize("background", ["pass", "proxy"])
async def test_compressed_bomb_ends_the_stream(
    background: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A few kilobytes that become one endless event: the stream ends as a lost one."""
    proxy = await lastword(max_event_bytes=MIB, background=background)
    created, *_ = vllm_events()
    encoder = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    packed = encoder.compress(created + b"data: ") + encoder.flush(zlib.Z_SYNC_FLUSH)
    packed += encoder.compress(bytes(40 * MIB)) + encoder.flush()
    headers = [*EVENT_STREAM, ("content-encoding", "gzip")]
    fake.script(stream([packed], headers=headers, ending="hang"))
    body = b'{"stream":true,"background":true}' if background == "proxy" else STREAM
    answer = await post_stream(proxy.url, body)
    assert answer.ending == ("clean" if background == "proxy" else "cut")
    assert b"\n\nevent: response.failed\n" in answer.body
    assert len(answer.body) < 3 * MIB
    assert await metric(proxy.admin_url, HELD) == 0


async def test_streams_beyond_the_limit_are_503(fake: FakeVllm, lastword: StartLastword) -> None:
    """Only on the two routes; as soon as one has ended there is room for the next."""
    proxy = await lastword(max_streams=2)
    fake.handler = stream(vllm_events(), gated=True)
    async with connect(proxy.url) as one, connect(proxy.url) as two:
        await one.post()
        await two.request("GET", RESPONSES + "/resp_1?stream=true")
        await fake.exchange(1)
        assert_full(await post_stream(proxy.url), "max_streams")
        assert_full(await exchange(proxy.url, "GET", RESPONSES + "/resp_1"), "max_streams")
        assert await metric(proxy.admin_url, "lastword_stream_slots") == 2
        fake.script(echo, echo)
        for target in (RESPONSES + "/resp_1/cancel", "/v1/chat/completions"):
            assert (await exchange(proxy.url, "POST", target, body=STREAM)).status == 200
        two.leave()
        await settled(proxy.admin_url, "lastword_stream_slots", 1)
        fake.script(echo)
        assert (await post_stream(proxy.url)).status == 200
    assert await total(proxy.admin_url, TURNED_AWAY, limit="max_streams") == 2


async def test_running_background_response_counts(fake: FakeVllm, lastword: StartLastword) -> None:
    """Also when nobody follows it; it can be cancelled all the same, and makes room."""
    proxy = await lastword(max_streams=1, background="proxy")
    FakeResponsesApi(fake, gated=True)
    async with creating(proxy.url, gated=fake) as follower:
        await follower.read(1)
    await settled(proxy.admin_url, "lastword_stream_slots", 1)
    assert_full(await post_stream(proxy.url), "max_streams")
    response_id = next(iter(api_of(fake).runs))
    assert (await cancel(proxy.url, response_id=response_id)).status == 200
    await settled(proxy.admin_url, "lastword_stream_slots", 0)
