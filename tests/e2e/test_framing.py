"""Each side of the proxy frames its messages for itself, whatever the other side speaks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.captures import corrected
from tests.e2e.wire import RESPONSES, STREAM, connect, exchange
from tests.fake_scripts import JSON, answer, echo, stream, vllm_events
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import Exchange, FakeVllm


async def test_body_on_any_method_is_kept(fake: FakeVllm, lastword: StartLastword) -> None:
    """A body belongs to its request whatever the method; an empty one stays empty, not absent."""
    proxy = await lastword()
    fake.handler = echo
    for method in ("GET", "DELETE", "OPTIONS", "PUT"):
        for target in ("/x", RESPONSES, RESPONSES + "/resp_1"):
            got = await exchange(proxy.url, method, target, body=b"body")
            assert got.json()["body"] == "body", (method, target)
            await exchange(proxy.url, method, target, body=b"")
            assert fake.requests[-1].values("content-length") == [b"0"]
            await exchange(proxy.url, method, target)
            assert fake.requests[-1].values("content-length") == []


async def test_client_of_http_1_0(fake: FakeVllm, lastword: StartLastword) -> None:
    """A client that knows no chunks gets a body that ends with its connection."""
    proxy = await lastword()
    events = vllm_events()
    cases = [
        (RESPONSES, stream(events), corrected(b"".join(events))),
        (RESPONSES, answer(200, body=b"hello"), b"hello"),
        ("/v1/completions", stream([b"a", b"b"], headers=JSON), b"ab"),
    ]
    for target, script, want in cases:
        fake.script(script)
        async with connect(proxy.url) as wire, asyncio.timeout(PATIENCE_S):
            head = f"POST {target} HTTP/1.0\r\nHost: x\r\nContent-Length: {len(STREAM)}\r\n\r\n"
            await wire.send(head.encode() + STREAM)
            got = await wire.head()
            assert got.status == 200
            assert got.values("transfer-encoding") == []
            assert await wire.reader.read() == want
        assert fake.requests[-1].values("via")[0].startswith(b"1.0 lastword-")


async def test_upstream_of_http_1_0(fake: FakeVllm, lastword: StartLastword) -> None:
    """A body that ends with upstream's connection reaches the client with an end of its own."""
    proxy = await lastword()

    async def old(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.send_raw(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nhello")
        await exchange.send_raw(b" world")
        await exchange.cut()

    fake.handler = old
    for target in ("/v1/models", RESPONSES):
        got = await exchange(proxy.url, "POST", target, body=STREAM)
        assert (got.body, got.ending) == (b"hello world", "clean")


async def test_requests_sent_ahead_are_answered_in_order(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """A client may send its next request before it has read the answer to the last."""
    proxy = await lastword()
    fake.handler = echo
    async with connect(proxy.url) as wire:
        await wire.send(
            b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\n"
            b"POST /2 HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
            b"GET /3 HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        got = [(await wire.answer()).json() for _ in range(3)]
    assert [(answer["target"], answer["body"]) for answer in got] == [
        ("/1", ""),
        ("/2", "abc"),
        ("/3", ""),
    ]


async def test_client_that_closes_leaves_upstream_open(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """Connection: close is said of one hop: ours closes, upstream's is kept."""
    proxy = await lastword()
    fake.handler = echo
    for target in ("/v1/models", RESPONSES):
        async with connect(proxy.url) as wire:
            await wire.request("POST", target, [("Connection", "close")], STREAM)
            assert (await wire.answer()).values("connection") == [b"close"]
            assert await wire.at_eof()
        assert b"close" not in fake.requests[-1].values("connection")
    assert fake.connections == 1


async def test_connection_goes_on_after_an_early_answer(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """The rest of an upload that was refused is no new request."""
    proxy = await lastword()

    async def refuse(exchange: Exchange) -> None:
        await exchange.respond(413, [("content-length", "3")])
        await exchange.send(b"big")
        exchange.ended = True

    fake.script(refuse, echo)
    async with connect(proxy.url) as wire:
        await wire.request("POST", "/v1/files", [("Content-Length", "40")])
        await wire.send(b"GET /smuggled")
        assert (await wire.answer()).status == 413
        await wire.send(b" HTTP/1.1\r\nHost: x\r\n\r\n".ljust(27))
        await wire.request("GET", "/after")
        assert (await wire.answer()).json()["target"] == "/after"
    assert [request.target for request in fake.requests] == [b"/v1/files", b"/after"]


async def test_long_headers_pass(fake: FakeVllm, lastword: StartLastword) -> None:
    """Keys and cookies of 30 KB are no reason to refuse a request or an answer."""
    proxy = await lastword()
    long = "y" * 30_000
    fake.handler = answer(200, [*JSON, ("x-long", long)])
    got = await exchange(proxy.url, "GET", "/v1/models", [("X-Long", long)])
    assert got.values("x-long") == [long.encode()]
    assert fake.requests[0].values("x-long") == [long.encode()]


async def test_body_that_says_it_is_too_large_is_refused_before_upstream_is_asked(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """A Content-Length over the limit is 413 at once, on every path; upstream sees nothing."""
    proxy = await lastword(max_request_body_bytes=1000)
    for target in ("/v1/files", "/v1/responses"):
        async with connect(proxy.url) as wire:
            head = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n"
            await wire.send(head.encode() + b"Expect: 100-continue\r\n\r\n")
            answer = await wire.answer()
        assert answer.status == 413
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not fake.requests


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "x, h2c"])
@pytest.mark.parametrize("pieces", ["together", "apart", "byte by byte"])
async def test_upgrade_is_ignored_and_the_body_kept(
    protocol: str, pieces: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """The JDK's client asks for h2c with every first request; its body goes up all the same."""
    proxy = await lastword()
    fake.handler = echo
    for target in ("/v1/responses", "/v1/files"):
        head = (
            f"POST {target} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings, X-Hop\r\n"
            f"Upgrade: {protocol}\r\nHTTP2-Settings: AAMA\r\nX-Hop: 1\r\nX-Kept: 1\r\n"
            "Content-Length: 7\r\n\r\n"
        ).encode()
        data = head + b'{"a":1}'
        cuts = {"together": [data], "apart": [head, b'{"a":1}']}
        async with connect(proxy.url) as wire:
            for piece in cuts.get(pieces, [data[i : i + 1] for i in range(len(data))]):
                await wire.send(piece)
            assert (await wire.answer()).status == 200
            await wire.request("GET", "/v1/models")  # the connection goes on
            assert (await wire.answer()).status == 200
        request = fake.requests[-2]
        assert request.body == b'{"a":1}'
        assert request.values("x-kept") == [b"1"]
        for name in ("upgrade", "http2-settings", "connection", "x-hop"):
            assert not request.values(name), name
