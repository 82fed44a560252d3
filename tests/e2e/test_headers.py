"""Which headers cross the proxy, in both directions, and that none is invented."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.wire import RESPONSES, connect, exchange, post_stream
from tests.fake_scripts import EVENT_STREAM, JSON, answer, echo, stream, vllm_events

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.conftest import StartLastword
    from tests.fake_connection import Header
    from tests.fake_vllm import Exchange, FakeVllm

OURS_UP = {"via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-request-id"}
OURS_DOWN = {"via", "x-request-id"}
HOP = {"connection", "keep-alive", "transfer-encoding"}
"""What each side may say of its own connection."""


def plain(headers: Iterable[Header], without: set[str]) -> list[Header]:
    """Lower the names and leave those out that the proxy may add."""
    pairs = [(name.lower(), value) for name, value in headers]
    return [pair for pair in pairs if pair[0].decode() not in without]


async def test_headers_go_up_as_they_came(fake: FakeVllm, lastword: StartLastword) -> None:
    """Repeated ones stay apart and in order, values keep their bytes, and Host is kept."""
    proxy = await lastword()
    fake.handler = echo
    sent = [
        ("Host", "models.example.org:1234"),
        ("X-A", "1"),
        ("x-b", 'with "quotes", commas;  two spaces'),
        ("X-A", "2"),
        ("X-Latin", "J\xf6rg \xff"),
        ("X-Empty", ""),
        ("X-Under_Score", "_"),
        ("Authorization", "Bearer secret"),
        ("Cookie", "a=1; b=2"),
        ("Content-Type", "application/json"),
        ("Accept", "*/*;q=0.1"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ]
    want = [(name.lower().encode(), value.encode("latin-1")) for name, value in sent]
    await exchange(proxy.url, "GET", "/v1/models", sent)
    assert plain(fake.requests[0].headers, OURS_UP | HOP) == want
    await exchange(proxy.url, "POST", RESPONSES, sent, b"{}")
    got = plain(fake.requests[1].headers, OURS_UP | HOP | {"content-length", "accept-encoding"})
    assert got == want


async def test_no_header_is_invented(fake: FakeVllm, lastword: StartLastword) -> None:
    """A request without User-Agent, Accept and the like arrives without them."""
    proxy = await lastword()
    fake.handler = echo
    await exchange(proxy.url, "GET", "/v1/models")
    assert [name for name, _ in plain(fake.requests[0].headers, OURS_UP | HOP)] == [b"host"]
    await exchange(proxy.url, "POST", RESPONSES, [], b"{}")
    names = [name for name, _ in plain(fake.requests[1].headers, OURS_UP | HOP)]
    assert sorted(names) == [b"accept-encoding", b"content-length", b"host"]


async def test_hop_by_hop_headers_stay_on_their_hop_upwards(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """The fixed list goes, and what Connection names goes too, in any case and place."""
    proxy = await lastword()
    fake.handler = echo
    sent = [
        ("Connection", "keep-alive, X-Secret"),
        ("X-Secret", "1"),
        ("Connection", "x-OTHER"),
        ("X-Other", "2"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Connection", "keep-alive"),
        ("Proxy-Authorization", "Basic x"),
        ("TE", "trailers"),
        ("Trailer", "X-Sum"),
        ("Upgrade", "h2c"),
        ("X-Stays", "3"),
    ]
    for method, target, body in [("GET", "/v1/models", None), ("POST", RESPONSES, b"{}")]:
        got = await exchange(proxy.url, method, target, sent, body)
        assert got.status == 200
        request = fake.requests[-1]
        names = {name.decode().lower() for name, _ in request.headers}
        assert "x-stays" in names
        assert not names & {
            *("x-secret", "x-other", "keep-alive", "proxy-connection", "proxy-authorization"),
            *("te", "trailer", "upgrade"),
        }
        assert b"x-secret" not in b"".join(request.values("connection")).lower()
        assert request.body == (body or b"")


async def test_trailers_of_a_request_are_dropped(fake: FakeVllm, lastword: StartLastword) -> None:
    """A trailer never becomes a header: it would forge what the head did not say."""
    proxy = await lastword()
    fake.handler = echo
    for target in ("/v1/files", RESPONSES):
        async with connect(proxy.url) as wire:
            await wire.request("POST", target, [("Transfer-Encoding", "chunked")])
            await wire.send(b"2\r\n{}\r\n0\r\nAuthorization: forged\r\nX-Sum: 1\r\n\r\n")
            assert (await wire.answer()).status == 200
        request = fake.requests[-1]
        assert request.body == b"{}"
        assert request.trailers in (b"", b"\r\n")
        assert b"forged" not in request.raw_head


async def test_headers_come_down_as_they_were_sent(fake: FakeVllm, lastword: StartLastword) -> None:
    """Repeated ones stay apart and in order, values keep their bytes; Server and Date come once."""
    proxy = await lastword()
    sent = [
        ("Set-Cookie", "a=1; Path=/; Expires=Wed, 09 Jun 2027 10:18:14 GMT"),
        ("X-B", "J\xf6rg"),
        ("Set-Cookie", "b=2"),
        ("Vary", "Origin"),
        ("Vary", "Accept"),
        ("X-Empty", ""),
        ("content-type", "application/json"),
    ]
    want = [
        (b"date", b"Sun, 29 Nov 2026 15:16:40 GMT"),
        (b"server", b"uvicorn"),
        *((name.lower().encode(), value.encode("latin-1")) for name, value in sent),
        (b"content-length", b"2"),
    ]
    fake.handler = answer(200, sent)
    for method, target in [("GET", "/v1/models"), ("POST", RESPONSES)]:
        got = await exchange(proxy.url, method, target, body=b"{}")
        assert plain(got.headers, OURS_DOWN | {"connection"}) == want


async def test_headers_of_an_event_stream_come_down_as_they_were_sent(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """An event stream keeps its headers too; only buffering is switched off."""
    proxy = await lastword()
    sent = [*EVENT_STREAM, ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("vary", "Origin")]
    fake.handler = stream(vllm_events(), headers=sent)
    added = OURS_DOWN | HOP | {"x-accel-buffering", "cache-control", "date", "server"}
    got = await post_stream(proxy.url)
    want = [(name.lower().encode(), value.encode()) for name, value in sent]
    assert plain(got.headers, added) == want
    assert (len(got.values("date")), got.values("server")) == (1, [b"uvicorn"])


async def test_nothing_is_added_where_upstream_says_little(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """No Server, Date or Content-Type of the proxy's own stands in an answer of upstream."""
    proxy = await lastword()

    async def terse(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.send_raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await exchange.end()

    fake.handler = terse
    got = await exchange(proxy.url, "GET", "/ping")
    assert plain(got.headers, OURS_DOWN | {"connection"}) == [(b"content-length", b"2")]


async def test_hop_by_hop_headers_stay_on_their_hop_downwards(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """What upstream says of its own connection is no business of the client."""
    proxy = await lastword()
    hop = [
        ("Connection", "close, X-Internal"),
        ("X-Internal", "1"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Connection", "close"),
        ("Upgrade", "h2c"),
        ("Trailer", "x-sum"),
        ("X-Stays", "2"),
    ]
    fake.script(answer(200, [*JSON, *hop]), stream(vllm_events(), headers=[*EVENT_STREAM, *hop]))
    async with connect(proxy.url) as wire:
        for _ in range(2):  # upstream's close does not close the client's connection
            await wire.post()
            got = await wire.answer()
            assert got.values("x-stays") == [b"2"]
            for name in ("x-internal", "keep-alive", "proxy-connection", "upgrade", "trailer"):
                assert got.values(name) == [], name
            assert b"x-internal" not in b"".join(got.values("connection")).lower()


async def test_every_answer_has_a_request_id(fake: FakeVllm, lastword: StartLastword) -> None:
    """Upstream's answers, the proxy's own errors, and what is no HTTP: the client's id, or one."""
    proxy = await lastword(max_request_body_bytes=1000)
    fake.handler = answer(200)
    given = [("X-Request-Id", "mine")]
    cases: list[tuple[int, str, str, list[tuple[str, str]], bytes | None]] = [
        (200, "GET", "/v1/models", [], None),
        (200, "POST", RESPONSES, [], b"{}"),
        (400, "GET", "/v1/../metrics", [], None),
        (400, "POST", RESPONSES, [("Lastword-Correct", "maybe")], b"{}"),
        (413, "POST", RESPONSES, [], b"x" * 1001),
        (502, "GET", "/v1/models", [], None),
    ]
    for status, method, target, headers, body in cases:
        fake.accept = "close" if status == 502 else "serve"
        if status == 502:
            await fake.drop_connections()
        got = await exchange(proxy.url, method, target, [*headers, *given], body)
        assert (got.status, got.values("x-request-id")) == (status, [b"mine"])
        got = await exchange(proxy.url, method, target, headers, body)
        assert [len(value) for value in got.values("x-request-id")] == [32]
    async with connect(proxy.url) as wire:
        await wire.send(b"no HTTP\r\n\r\n")
        got = await wire.answer()
        assert (got.status, len(got.values("x-request-id"))) == (400, 1)


async def test_no_cookie_of_one_client_reaches_another(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """A cookie that upstream sets goes to its client alone, upstream by address or by name."""
    for upstream in (fake.url, f"http://localhost:{fake.port}"):
        proxy = await lastword(upstream=upstream)
        fake.handler = answer(200, [*JSON, ("set-cookie", "session=alice; Path=/")])
        assert (await post_stream(proxy.url)).values("set-cookie") == [b"session=alice; Path=/"]
        await post_stream(proxy.url)
        await exchange(proxy.url, "GET", "/v1/models")
        await exchange(proxy.url, "GET", "/v1/models", [("Cookie", "session=bob")])
        cookies = [request.values("cookie") for request in fake.requests[-4:]]
        assert cookies == [[], [], [], [b"session=bob"]]


async def test_expect_is_answered_at_the_edge(fake: FakeVllm, lastword: StartLastword) -> None:
    """A client that asks before it sends gets its 100 from us; upstream gets a plain request."""
    proxy = await lastword()
    fake.handler = echo
    for target in ("/v1/files", RESPONSES):
        async with connect(proxy.url) as wire:
            await wire.request(
                "POST", target, [("Expect", "100-continue"), ("Content-Length", "2")]
            )
            assert (await wire.head()).status == 100
            await wire.send(b"{}")
            got = await wire.answer()
            assert got.json()["body"] == "{}"
        assert fake.requests[-1].values("expect") == []
