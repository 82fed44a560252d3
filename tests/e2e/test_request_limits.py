"""No request may be endless: in bytes, in lines, in time, or in number."""

from __future__ import annotations

import asyncio
import resource
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from proxy.gateway import server
from tests.e2e.raw import (
    CUTS,
    GET,
    assert_refused,
    by_byte,
    chunked,
    head,
    last_answer,
    send,
    talk,
    whole,
)
from tests.e2e.wire import RESPONSES, connect, exchange
from tests.fake_scripts import answer, echo, hang, stream, vllm_events
from tests.loops import on_loops
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import StartLastword
    from tests.fake_vllm import Exchange, FakeVllm

HALF = b"POST /x HTTP/1.1\r\nHost: a\r\nX-A: 1"

pytest_generate_tests = on_loops("uvloop")


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    """Cut bytes into pieces of one size."""
    for place in range(0, len(data), size):
        yield data[place : place + size]


async def begin_and_wait(exchange: Exchange) -> None:
    """Begin an answer and wait for the proxy to hang up."""
    await exchange.respond(200)
    await exchange.send(b"begun")
    await exchange.wait_closed()


async def answer_early(exchange: Exchange) -> None:
    """Answer before the request is whole."""
    await exchange.respond(200, [("content-length", "0")])
    exchange.ended = True


# Bytes and lines.


@pytest.mark.parametrize(
    ("endless", "status"),
    [
        pytest.param(b"GET /" + b"a" * 1000, 414, id="target"),
        pytest.param(HALF + b"a" * 1000, 431, id="value"),
        pytest.param(HALF + b"\r\n" + b"a" * 1000, 431, id="name"),
        pytest.param(HALF + b"\r\nX-A: 1" * 100, 431, id="lines"),
        pytest.param(b"\r\n" * 500, 431, id="empty lines before"),
        pytest.param(HALF + b"\r\na:" * 20, 431, id="headers"),
    ],
)
async def test_endless_head_is_refused_while_it_comes(
    endless: bytes, status: int, fake: FakeVllm, lastword: StartLastword
) -> None:
    """What is over the limits is refused before the head is whole, however it is cut."""
    proxy = await lastword(max_header_bytes=300, max_headers=20)
    for cut in (whole(endless), pieces(endless, 170), by_byte(endless)):
        assert_refused(await talk(proxy.url, cut), status)
    assert fake.connections == 0


async def test_head_at_the_limits_passes(fake: FakeVllm, lastword: StartLastword) -> None:
    """A head passes up to the very limits and is refused one above them, even if all is there."""
    proxy = await lastword(max_header_bytes=1000, max_headers=20)
    fake.handler = echo
    many = head(*[b"X-A: 1"] * 19, b"Content-Length: 0")
    long = head(b"X-A: ")
    long = head(b"X-A: " + b"a" * (1000 - len(long)))
    for data, passes in (
        (head(*[b"X-A: 1"] * 19), True),
        (many, False),
        (long, True),
        (long.replace(b"aaa", b"a" * 40, 1), False),
    ):
        for cut in CUTS.values():
            async with connect(proxy.url) as wire:
                await send(wire, cut(data))
                if passes:
                    assert (await wire.answer()).status == 200
                else:
                    assert_refused(await last_answer(wire), 431)


async def test_body_is_not_taken_for_a_head(fake: FakeVllm, lastword: StartLastword) -> None:
    """Only a head's own bytes count: not its body, not requests before it in the same read."""
    proxy = await lastword(max_header_bytes=1000)
    fake.handler = echo
    long = head(b"Content-Length: 5000") + b"b" * 5000
    data = long + GET * 50 + long + GET
    for size in (len(data), 1700, 150):
        async with connect(proxy.url) as wire:
            await send(wire, pieces(data, size))
            for body in ("b" * 5000, *[""] * 50, "b" * 5000, ""):
                assert (await wire.answer()).json()["body"] == body


@pytest.mark.parametrize(
    "endless",
    [
        pytest.param(b"5;" + b"a" * 1200, id="chunk extension"),
        pytest.param((b"1;" + b"a" * 150 + b"\r\nx\r\n") * 10, id="chunk extensions"),
        pytest.param(b"0" * 1200, id="chunk size"),
        pytest.param(b"0\r\nX-A: " + b"a" * 1200, id="trailer"),
        pytest.param(b"0\r\n" + b"X-A: 1\r\n" * 22, id="trailers"),
    ],
)
async def test_endless_framing_is_refused(
    endless: bytes, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Framing that brings no body is limited like a head, and upstream is let go."""
    proxy = await lastword(max_header_bytes=1000, max_headers=20)
    for size in (len(endless), 200, 1):
        before = len(fake.exchanges)
        fake.script(hang)
        async with connect(proxy.url) as wire:
            await wire.send(chunked(b""))
            await fake.exchange(before)
            await send(wire, pieces(endless, size))
            assert_refused(await last_answer(wire), 431)
        await fake.exchanges[-1].until_finished()


async def test_small_chunks_are_no_endless_framing(fake: FakeVllm, lastword: StartLastword) -> None:
    """A body in chunks of a byte, with more framing than any head may have, passes."""
    proxy = await lastword(max_header_bytes=1000)
    fake.handler = echo
    body = b"1;a=b\r\nx\r\n" * 2000 + b"0\r\n\r\n"
    for size in (len(body), 777, 11):
        async with connect(proxy.url) as wire:
            await send(wire, pieces(chunked(body), size))
            assert (await wire.answer()).json()["body"] == "x" * 2000


# Time.


async def test_half_head_is_closed_from_its_first_byte(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """A head that dribbles gets no more time than one that stops: 408, then the end."""
    proxy = await lastword(header_timeout_s=0.2)
    fake.handler = echo
    assert_refused(await talk(proxy.url, [HALF]), 408)
    async with connect(proxy.url) as wire:
        await wire.send(GET)  # the second request of a connection is held to it too
        assert (await wire.answer()).status == 200
        await wire.send(HALF)
        last = asyncio.create_task(last_answer(wire))
        while not last.done():
            await wire.send(b"a")
            await asyncio.sleep(0.01)
        assert_refused(await last, 408)
    async with connect(proxy.url) as wire:  # empty lines are no head, and no life either
        end = asyncio.create_task(wire.at_eof())
        while not end.done():
            await wire.send(b"\r\n")
            await asyncio.sleep(0.01)
        assert await end


async def test_half_head_behind_a_request_waits_for_its_answer(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """While an answer runs, a head that was sent ahead in part has time, and takes none from it."""
    proxy = await lastword(header_timeout_s=0.1)
    events = vllm_events()
    for ahead, rest in ((b"\r\n" + HALF, b"\r\n\r\n"), (b"\r\n", GET), (HALF, b"")):
        fake.close_gates()
        fake.script(stream(events, gated=True), echo)
        async with connect(proxy.url) as wire:
            await wire.post()
            await wire.send(ahead)
            await fake.gate("0").arrived()
            await asyncio.sleep(0.3)  # too short only makes this weaker
            await wire.send(rest)
            for number in range(len(events)):
                fake.gate(str(number)).open()
            fake.gate("ending").open()
            streamed = await wire.answer()
            assert b"response.incomplete" in streamed.body
            assert streamed.ending == "clean"
            if rest:
                assert (await wire.answer()).status == 200
            else:
                assert_refused(await last_answer(wire), 408)
    fake.queue.clear()


async def test_connection_that_says_nothing_is_closed(
    fake: FakeVllm, lastword: StartLastword, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed like one that says nothing more, at whatever point of a request it stopped."""
    monkeypatch.setattr(server, "CLIENT_KEEPALIVE_S", 0.2)
    proxy = await lastword()

    fake.script(answer(200), answer_early)
    async with connect(proxy.url) as wire:
        assert await wire.at_eof()
    async with connect(proxy.url) as wire:
        await wire.send(GET)
        assert (await wire.answer()).status == 200
        assert await wire.at_eof()
    async with connect(proxy.url) as wire:  # the answer comes before the end of the request
        await wire.send(head(b"Content-Length: 3"))
        assert (await wire.answer()).status == 200
        await wire.send(b"abc")
        assert await wire.at_eof()


async def test_body_that_stops_is_given_up(fake: FakeVllm, lastword: StartLastword) -> None:
    """A client that sends no more of its body is refused, and upstream is let go."""
    proxy = await lastword(write_stall_s=0.2)
    for target in (b"/v1/responses", b"/v1/files"):
        fake.script(hang)
        data = head(b"Content-Length: 3").replace(b"/x", target) + b"a"
        assert_refused(await talk(proxy.url, [data]), 408)
    await fake.until(lambda: all(exchange.closed for exchange in fake.exchanges))
    fake.queue.clear()

    fake.script(answer_early)
    async with connect(proxy.url) as wire:  # answered already: it gets no second answer
        await wire.send(head(b"Content-Length: 3") + b"a")
        assert (await wire.answer()).status == 200
        assert await wire.at_eof()


async def test_upload_that_is_held_back_is_not_given_up(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """What upstream does not take, the client cannot send."""
    proxy = await lastword(write_stall_s=0.1)
    body = b"x" * 32 * 2**20

    async def slow(exchange: Exchange) -> None:
        exchange.pause_reading()
        await exchange.gate("read")
        exchange.resume_reading()
        await exchange.read_body()
        await exchange.answer(200)

    fake.script(slow)
    async with connect(proxy.url) as wire:
        sending = asyncio.create_task(
            wire.request("POST", "/v1/files", [], body), name="the client's upload"
        )
        await fake.gate("read").arrived()
        await asyncio.sleep(0.4)  # too short only makes this weaker
        assert not sending.done()
        fake.gate("read").open()
        await sending
        assert (await wire.answer()).status == 200


# Number.


async def test_requests_sent_ahead_are_limited(fake: FakeVllm, lastword: StartLastword) -> None:
    """Those within the limit are answered in order, and the one above it last of all."""
    proxy = await lastword()
    fake.handler = echo
    async with connect(proxy.url) as wire:
        await wire.send(GET * 200)
        answers = [await wire.answer() for _ in range(65)]
        assert {answer.status for answer in answers} == {200}
        assert_refused(await last_answer(wire), 429)
    assert len(fake.requests) == 65


async def test_five_hundred_half_heads_hold_nobody_up(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """The proxy answers beside them, and in the end closes every one."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    proxy = await lastword(header_timeout_s=1.0)
    fake.handler = echo
    try:
        async with AsyncExitStack() as stack:
            wires = [await stack.enter_async_context(connect(proxy.url)) for _ in range(500)]
            for wire in wires:
                await wire.send(HALF)
            assert (await exchange(proxy.url, "GET", "/x")).status == 200
            statuses = {(await last_answer(wire)).status for wire in wires}
            assert statuses == {408}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# What a refusal leaves alone.


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(b"garbage\r\n\r\n", id="garbage"),
        pytest.param(b"GET /x HTTP/1.1\r\n\r\n", id="no Host"),
        pytest.param(chunked(b"zz\r\n"), id="body that breaks"),
    ],
)
async def test_refusal_waits_for_the_answers_before_it(
    broken: bytes, fake: FakeVllm, lastword: StartLastword
) -> None:
    """What was sent behind a sound request spoils nothing of its answer."""
    proxy = await lastword()
    fake.handler = stream(vllm_events(), gated=True)
    for sound in (1, 2):
        fake.close_gates()
        async with connect(proxy.url) as wire:
            for _ in range(sound):
                await wire.post()
            await fake.gate("0").arrived()
            await wire.send(broken)
            await asyncio.sleep(0.05)  # for the proxy to read it; too short only makes this weaker
            for number in range(len(vllm_events())):
                fake.gate(str(number)).open()
            fake.gate("ending").open()
            for _ in range(sound):
                streamed = await wire.answer()
                assert streamed.ending == "clean"
                assert streamed.body.endswith(b"\n\n")
            assert_refused(await last_answer(wire), 400)
    assert {request.target for request in fake.requests} == {RESPONSES.encode()}
    assert len(fake.requests) == 3


async def test_body_that_breaks_behind_the_head_of_its_answer_cuts_it(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """There is no place for a second answer: the first is cut, and upstream is let go."""
    proxy = await lastword()

    fake.handler = begin_and_wait
    async with connect(proxy.url) as wire:
        await wire.send(chunked(b"3\r\nabc\r\n"))
        answer = await wire.head()
        assert await wire.chunk() == b"begun"
        await wire.send(b"zz\r\n")
        assert (await wire.body(answer)).ending == "cut"
    await fake.exchanges[0].until_closed()


async def test_body_that_stops_behind_the_head_of_its_answer_resets_http_1_0(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """A client whose answers end with the connection must not take a cut one for whole."""
    proxy = await lastword(write_stall_s=0.2)
    fake.handler = begin_and_wait
    async with connect(proxy.url) as wire:
        await wire.send(head(b"Content-Length: 3", first=b"POST /x HTTP/1.0") + b"a")
        assert (await wire.head()).status == 200
        async with asyncio.timeout(PATIENCE_S):
            assert await wire.reader.readexactly(5) == b"begun"
            with pytest.raises(ConnectionResetError):
                await wire.reader.read()
    await fake.exchanges[0].until_closed()


async def test_refusal_is_not_lost_to_a_reset(fake: FakeVllm, lastword: StartLastword) -> None:
    """A client that sends all it has before it reads finds the answer, not a broken connection."""
    proxy = await lastword(max_request_body_bytes=1000)
    fake.handler = hang
    for data, status in (
        (HALF + b"a" * 2**22, 431),
        (head(b"Content-Length: %d" % 2**22) + b"a" * 2**22, 413),
        (chunked(b"400000\r\n" + b"a" * 2**22), 413),
    ):
        async with connect(proxy.url) as wire:
            await wire.send(data)
            await wire.send(b"more")
            got = await last_answer(wire)
            assert_refused(got, status)
    assert not [request for request in fake.requests if request.complete]


async def test_refusal_of_a_head_request_has_no_body(lastword: StartLastword) -> None:
    """The client of a HEAD reads none (RFC 9110, section 9.3.2)."""
    proxy = await lastword()
    async with connect(proxy.url) as wire:
        await wire.send(b"HEAD /../x HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = await wire.head()
        assert answer.status == 400
        assert answer.values("content-length") != [b"0"]
        assert await wire.at_eof()


async def test_request_id_of_a_refused_request_is_kept(lastword: StartLastword) -> None:
    """An answer can be found by the id that its request had."""
    proxy = await lastword()
    answer = await talk(proxy.url, [head(b"X-Request-Id: mine", b"Host: b")])
    assert answer.values("x-request-id") == [b"mine"]


# Bodies that the client asks about.


async def test_answer_instead_of_a_100_ends_the_connection(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """The client may send its body after it or not: what comes next could be mistaken for it."""
    proxy = await lastword()
    for line in (b"Lastword-Correct: nonsense", b"Content-Length: 999999999"):
        length = b"" if line.startswith(b"Content") else b"Content-Length: 30"
        lines = [line for line in (b"Expect: 100-continue", line, length) if line]
        async with connect(proxy.url) as wire:
            await wire.send(head(*lines, first=b"POST /v1/responses HTTP/1.1") + b"")
            got = await last_answer(wire)
            assert_refused(got, 400, 413)
    assert fake.connections == 0


async def test_chunked_body_over_the_limit_is_413(fake: FakeVllm, lastword: StartLastword) -> None:
    """A body of no announced length is counted while it comes, after the 100 it asked for."""
    proxy = await lastword(max_request_body_bytes=1000)
    for target in (b"/v1/responses", b"/v1/files"):
        fake.script(hang)
        async with connect(proxy.url) as wire:
            await wire.send(chunked(b"", b"Expect: 100-continue").replace(b"/x", target))
            assert (await wire.head()).status == 100
            await send(wire, [b"1f4\r\n" + b"a" * 500 + b"\r\n"] * 3)
            assert_refused(await last_answer(wire), 413)
    assert not [request for request in fake.requests if request.complete]
    await fake.until(lambda: all(exchange.closed for exchange in fake.exchanges))
    fake.queue.clear()
