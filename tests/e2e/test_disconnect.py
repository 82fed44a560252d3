"""The client leaves, or stops reading: upstream must feel it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.captures import corrected
from tests.e2e.wire import RESPONSES, STREAM, Wire, connect, post_stream
from tests.fake_scripts import EVENT_STREAM, hang, stream, vllm_events
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import Exchange, FakeVllm

CHAT = "/v1/chat/completions"
Ask = tuple[str, str, bytes | None]
REQUESTS = [
    pytest.param(("POST", RESPONSES, STREAM), id="create"),
    pytest.param(("GET", RESPONSES + "/resp_1?stream=true", None), id="replay"),
    pytest.param(("POST", CHAT, STREAM), id="chat"),
    # Behind a body that was held back, the server must read on to see its client leave.
    pytest.param(("POST", RESPONSES, STREAM + b" " * 500_000), id="large create"),
    pytest.param(("POST", CHAT, STREAM + b" " * 500_000), id="large chat"),
]
WAYS = (Wire.leave, Wire.reset)


async def send(wire: Wire, ask: Ask) -> None:
    """Send a request."""
    method, target, body = ask
    await wire.request(method, target, body=body)


@pytest.mark.parametrize("ask", REQUESTS)
async def test_client_that_leaves_before_the_head_closes_upstream(
    ask: Ask, fake: FakeVllm, lastword: StartLastword
) -> None:
    """While vLLM still prefills there is nobody to write to, and yet the request must end."""
    proxy = await lastword()
    fake.handler = hang
    for number, leave in enumerate(WAYS):
        async with connect(proxy.url) as wire:
            await send(wire, ask)
            asked = await fake.exchange(number)
            leave(wire)
            await asked.until_closed()


@pytest.mark.parametrize("ask", REQUESTS)
async def test_client_that_leaves_before_the_first_byte_closes_upstream(
    ask: Ask, fake: FakeVllm, lastword: StartLastword
) -> None:
    """The head has gone down and no event has come yet."""
    proxy = await lastword()
    fake.handler = stream([], ending="hang")
    for number, leave in enumerate(WAYS):
        async with connect(proxy.url) as wire:
            await send(wire, ask)
            await wire.head()
            leave(wire)
            await (await fake.exchange(number)).until_closed()


@pytest.mark.parametrize("ask", REQUESTS)
async def test_client_that_leaves_in_mid_stream_closes_upstream(
    ask: Ask, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A generation that nobody reads is ended, also while vLLM is silent between two tokens."""
    proxy = await lastword()
    events = vllm_events()[:4]
    fake.handler = stream(events, ending="hang")
    for number, leave in enumerate(WAYS):
        async with connect(proxy.url) as wire:
            await send(wire, ask)
            await wire.head()
            received = b""
            while len(received) < sum(map(len, events)):
                received += await wire.chunk()
            leave(wire)
            await (await fake.exchange(number)).until_closed()


async def test_client_that_leaves_in_its_upload_closes_upstream(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """A request that will never be complete is not kept open upstream."""
    proxy = await lastword()
    fake.handler = hang
    async with connect(proxy.url) as wire:
        await wire.send(b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf")
        asked = await fake.exchange()
        await fake.until(lambda: asked.request.body == b"half")
        wire.leave()
        await asked.until_closed()


async def test_the_other_clients_stay(fake: FakeVllm, lastword: StartLastword) -> None:
    """One client's leaving touches no other stream."""
    proxy = await lastword()
    events = vllm_events()
    fake.script(stream(events, ending="hang", gated=True), stream(events))
    async with connect(proxy.url) as leaver:
        await leaver.post()
        await leaver.head()
        fake.gate("0").open()
        await leaver.event()
        stayer = asyncio.create_task(post_stream(proxy.url))
        leaver.leave()
        await (await fake.exchange()).until_closed()
        async with asyncio.timeout(PATIENCE_S):
            assert (await stayer).body == corrected(b"".join(events))


@pytest.mark.parametrize("ask", REQUESTS)
async def test_reader_that_pauses_holds_upstream_back(
    ask: Ask, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A client that stops reading stops vLLM, with bounded memory between; then all of it comes."""
    proxy = await lastword()
    fake.send_buffer = 2**14
    created, *_, last = vllm_events()
    delta = b"event: response.output_text.delta\ndata: {%b}\n\n" % (b"x" * 2**15)
    pieces = [created, *[delta] * 1000, last]
    total = sum(map(len, pieces))
    fake.script(stream(pieces))
    async with connect(proxy.url, receive_buffer=2**14) as wire:
        await send(wire, ask)
        answer = await wire.head()
        asked = await fake.exchange()
        written = await asked.until_stalled()
        assert not asked.finished.is_set()
        assert written < total / 2
        await wire.body(answer)
        await asked.until_finished()
    assert answer.ending == "clean"
    sent = b"".join(pieces)
    assert answer.body == (sent if ask[1] == CHAT else corrected(sent))


async def test_reader_that_pauses_and_leaves_closes_upstream(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """A write that is being held back does not keep the upstream request alive."""
    proxy = await lastword()
    fake.send_buffer = 2**14

    async def endless(exchange: Exchange) -> None:
        await exchange.respond(200, EVENT_STREAM)
        while True:
            await exchange.send(b": %b\n\n" % (b"x" * 2**15))

    fake.script(endless)
    async with connect(proxy.url, receive_buffer=2**14) as wire:
        await wire.post()
        await wire.head()
        asked = await fake.exchange()
        await asked.until_stalled()
        wire.reset()
        await asked.until_closed()


async def test_uploads_are_held_back_too(fake: FakeVllm, lastword: StartLastword) -> None:
    """Upstream that takes nothing stops the client, with bounded memory between."""
    proxy = await lastword()
    size = 40 * 2**20

    async def slow(exchange: Exchange) -> None:
        exchange.pause_reading()
        await exchange.gate("read")
        exchange.resume_reading()
        await exchange.answer(200, body=str(len(await exchange.read_body())).encode())

    fake.script(slow)
    async with connect(proxy.url) as wire:
        await wire.request("POST", "/v1/files", [("Content-Length", str(size))])
        await fake.gate("read").arrived()
        sent = 0
        stalled = False
        while sent < size and not stalled:
            wire.writer.write(bytes(2**18))
            sent += 2**18
            try:
                async with asyncio.timeout(0.3):
                    await wire.writer.drain()
            except TimeoutError:
                stalled = True
        assert stalled
        assert sent < size / 2
        fake.gate("read").open()
        await wire.send(bytes(size - sent))
        assert (await wire.answer()).body == str(size).encode()
