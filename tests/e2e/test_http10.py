"""HTTP/1.0 clients, as nginx is by default: their bodies end with the connection."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.captures import corrected
from tests.e2e.wire import RESPONSES, Wire, connect
from tests.fake_scripts import stream, vllm_events
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import FakeVllm

EVENTS = vllm_events()


async def post(wire: Wire, target: str) -> None:
    """Send a POST of HTTP/1.0."""
    head = f"POST {target} HTTP/1.0\r\nHost: {wire.host}\r\nContent-Length: 2\r\n\r\n"
    await wire.send(head.encode() + b"{}")


async def rest(wire: Wire) -> tuple[bytes, bool]:
    """Read to the end; say whether it was a reset."""
    body = b""
    async with asyncio.timeout(PATIENCE_S):
        try:
            while data := await wire.reader.read(2**16):
                body += data
        except ConnectionResetError:
            return body, True
    return body, False


async def test_whole_stream_ends_with_the_connection(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """Nothing is chunked, the stream is corrected, and the connection is closed behind it."""
    proxy = await lastword()
    fake.script(stream(EVENTS))
    async with connect(proxy.url) as wire:
        await post(wire, RESPONSES)
        answer = await wire.head()
        body, reset = await rest(wire)
    assert not answer.values("transfer-encoding")
    assert (body, reset) == (corrected(b"".join(EVENTS)), False)


@pytest.mark.parametrize("target", [RESPONSES, "/v1/chat/completions"])
async def test_cut_is_a_reset(target: str, fake: FakeVllm, lastword: StartLastword) -> None:
    """Where a closed connection is a proper end, a cut must be a reset to be seen."""
    proxy = await lastword()
    fake.script(stream(EVENTS[:4], ending="cut"))
    async with connect(proxy.url) as wire:
        await post(wire, target)
        await wire.head()
        body, reset = await rest(wire)
    assert reset
    assert body.startswith(b"".join(EVENTS[:4]))
    assert (b"event: response.failed\n" in body) is (target == RESPONSES)


async def test_reset_waits_until_all_was_taken(fake: FakeVllm, lastword: StartLastword) -> None:
    """A slow client gets every event and the failure before the connection breaks."""
    proxy = await lastword()
    large = [EVENTS[0], *(b"data: " + b"x" * 200_000 + b"\n\n" for _ in range(10))]
    fake.script(stream(large, ending="cut"))
    async with connect(proxy.url, receive_buffer=16_384) as wire:
        await post(wire, RESPONSES)
        await wire.head()
        body = b""
        while len(body) < 1_000_000:  # far behind, while upstream is lost already
            body += await wire.reader.read(8_192)
            await asyncio.sleep(0.001)
        tail, reset = await rest(wire)
    assert reset
    assert (body + tail).startswith(b"".join(large))
    assert b"event: response.failed\n" in tail
