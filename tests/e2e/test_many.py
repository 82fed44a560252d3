"""Many requests: at once, one after another, and over connections that have gone stale."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.captures import corrected
from tests.e2e.wire import RESPONSES, STREAM, connect, exchange, post_stream
from tests.fake_scripts import answer, close_without_answer, echo, stream, vllm_events
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import Exchange, FakeVllm

STREAMS = 200


async def test_streams_at_once_do_not_mix(fake: FakeVllm, lastword: StartLastword) -> None:
    """All 200 are open before the first is answered; each client gets its own, whole, corrected."""
    proxy = await lastword()

    async def own(exchange: Exchange) -> None:
        name = (await exchange.read_body()).decode()
        await exchange.gate("all are here")
        await stream(vllm_events(response_id=name, deltas=20))(exchange)

    fake.handler = own
    names = [f"resp_{number}" for number in range(STREAMS)]
    asked = [asyncio.create_task(post_stream(proxy.url, name.encode())) for name in names]
    await fake.until(lambda: len(fake.requests) == STREAMS)
    fake.gate("all are here").open()
    async with asyncio.timeout(PATIENCE_S):
        answers = await asyncio.gather(*asked)
    for name, got in zip(names, answers, strict=True):
        assert got.body == corrected(b"".join(vllm_events(response_id=name, deltas=20)))
        assert got.ending == "clean"


async def test_connections_are_kept_on_both_sides(fake: FakeVllm, lastword: StartLastword) -> None:
    """Requests one after another share a connection, whatever their answers look like."""
    proxy = await lastword()
    async with connect(proxy.url) as wire:
        for script in (answer(200), echo, answer(404), stream(vllm_events()), answer(204), echo):
            fake.script(script)
            await wire.request("POST", RESPONSES, body=STREAM)
            assert (await wire.answer()).ending == "clean"
    assert fake.connections == 1
    assert [request.number for request in fake.requests] == [1, 2, 3, 4, 5, 6]


async def test_connection_that_upstream_closes_is_not_reused(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """Upstream says Connection: close, and the next request goes on a new connection."""
    proxy = await lastword()

    async def last_one(exchange: Exchange) -> None:
        await exchange.answer(200, [("connection", "close")], b"{}")
        await exchange.wait_closed()

    fake.script(last_one, echo)
    for _ in range(2):
        assert (await post_stream(proxy.url)).status == 200
    assert fake.connections == 2


async def test_request_on_a_busy_connection_gets_its_own(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """A stream that runs holds no other request up."""
    proxy = await lastword()
    fake.script(stream(vllm_events(), gated=True), echo)
    async with connect(proxy.url) as wire:
        await wire.post()
        await wire.head()
        assert (await exchange(proxy.url, "GET", "/v1/models")).status == 200
    assert fake.connections == 2


async def test_connection_that_upstream_dropped_while_idle_is_not_used(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """After upstream's own keep-alive limit the next request, a POST too, just works."""
    proxy = await lastword()

    async def then_drop(exchange: Exchange) -> None:
        await exchange.answer(200)
        await exchange.half_close()
        await exchange.wait_closed()  # the proxy has seen it

    fake.script(then_drop, echo)
    assert (await post_stream(proxy.url)).status == 200
    await (await fake.exchange()).until_finished()
    assert (await post_stream(proxy.url)).json()["method"] == "POST"
    assert (fake.connections, len(fake.requests)) == (2, 2)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_idempotent_request_on_a_stale_connection_is_repeated(
    method: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Upstream closes just as the request comes: nothing was done, so it is sent again."""
    proxy = await lastword()
    fake.script(echo, close_without_answer, echo)
    await exchange(proxy.url, "GET", "/first")
    got = await exchange(proxy.url, method, "/second?x=%2F")
    assert got.status == 200
    assert [request.target for request in fake.requests[1:]] == [b"/second?x=%2F"] * 2
    assert [request.connection for request in fake.requests] == [1, 1, 2]


async def test_request_is_repeated_once_at_most(fake: FakeVllm, lastword: StartLastword) -> None:
    """Where the repeated request fails too, that is the answer."""
    proxy = await lastword()
    fake.script(echo, close_without_answer, close_without_answer)
    await exchange(proxy.url, "GET", "/first")
    assert (await exchange(proxy.url, "GET", "/second")).status == 502
    assert len(fake.requests) == 3


async def test_request_on_a_new_connection_is_not_repeated(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """A connection that was never used before is not stale: its failure is upstream's."""
    proxy = await lastword()
    fake.script(close_without_answer)
    assert (await exchange(proxy.url, "GET", "/first")).status == 502
    assert len(fake.requests) == 1


@pytest.mark.parametrize("target", [RESPONSES, "/v1/chat/completions"])
async def test_post_that_was_sent_is_not_repeated(
    target: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A generation may have begun: the client decides whether to ask again."""
    proxy = await lastword()
    fake.script(echo, close_without_answer)
    await exchange(proxy.url, "GET", "/first")
    assert (await exchange(proxy.url, "POST", target, body=STREAM)).status == 502
    assert len(fake.requests) == 2


async def test_request_is_not_repeated_after_a_byte_of_its_answer(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """Upstream was at work on it: a connection that spoke was not stale."""
    proxy = await lastword()

    async def a_few_bytes(exchange: Exchange) -> None:
        await exchange.send_raw(b"HTTP/1.1 2")
        await exchange.cut()

    fake.script(echo, a_few_bytes)
    await exchange(proxy.url, "GET", "/first")
    assert (await exchange(proxy.url, "GET", "/second")).status == 502
    assert len(fake.requests) == 2


async def test_idle_connections_are_dropped_before_vllm_drops_them(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """The proxy hangs up first, so that no request runs into vLLM's own limit of 5 s."""
    proxy = await lastword(upstream_keepalive_s=0.1)
    fake.handler = echo
    assert (await exchange(proxy.url, "GET", "/v1/models")).status == 200
    await fake.until(lambda: not fake.open)
