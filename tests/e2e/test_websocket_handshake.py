"""Who may open a WebSocket, what both sides are told, and what a refusal becomes."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
from websockets.utils import accept_key

from tests.e2e.websocket import HANDSHAKE, REALTIME, dial, websocket_upstream
from tests.e2e.wire import RESPONSES, Answer, connect, exchange
from tests.fake_scripts import JSON, answer, close_without_answer, garbage, hang
from tests.prometheus import total
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.conftest import StartLastword
    from tests.fake_vllm import Exchange, FakeVllm, Handler

OURS = {"via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-request-id"}


async def ask(url: str, target: str = REALTIME, headers: Iterable[tuple[str, str]] = ()) -> Answer:
    """Ask for a WebSocket and read an answer that refuses it."""
    return await exchange(url, "GET", target, [*HANDSHAKE, *headers])


async def agree(
    exchange: Exchange, headers: Iterable[tuple[str, str]] = (), key: str | None = None
) -> None:
    """Agree to a handshake, by default with the right key."""
    [asked] = exchange.request.values("sec-websocket-key")
    head = [
        ("Upgrade", "websocket"),
        ("Connection", "Upgrade"),
        ("Sec-WebSocket-Accept", accept_key(key or asked.decode())),
        *headers,
    ]
    lines = "".join(f"{name}: {value}\r\n" for name, value in head)
    await exchange.send_raw(f"HTTP/1.1 101 Yes\r\n{lines}\r\n".encode("latin-1"))


def agree_badly(headers: Iterable[tuple[str, str]] = (), key: str | None = None) -> Handler:
    """Agree to a handshake in a way that breaks it, and wait for the proxy to leave."""

    async def script(exchange: Exchange) -> None:
        await agree(exchange, headers, key)
        await exchange.wait_closed()

    return script


async def test_headers_of_a_handshake_go_up_as_they_came(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """As those of any request; the key and the extensions are each connection's own."""
    proxy = await lastword()
    fake.script(answer(403))
    sent = [
        ("Host", "models.example.org"),
        ("Authorization", "Bearer k"),
        ("Cookie", "a=1"),
        ("X-A", "1"),
        ("X-A", "J\xf6rg"),
        ("Origin", "https://app.example.org"),
        ("Sec-WebSocket-Protocol", "realtime, openai-insecure-api-key.k"),
        ("Sec-WebSocket-Protocol", "other"),
    ]
    hop = [
        ("Sec-WebSocket-Extensions", "permessage-deflate"),
        ("Keep-Alive", "timeout=5"),
        ("Connection", "x-secret"),
        ("X-Secret", "1"),
        ("Proxy-Authorization", "Basic x"),
        ("Content-Length", "0"),
    ]
    target = "/v1/real%2Ftime?a=%2F+b&a=&"
    got = await ask(proxy.url, target, [*sent, *hop])
    assert got.status == 403
    [request] = fake.requests
    assert (request.method, request.target) == ("GET", target.encode())
    names = OURS | {name.lower() for name, _ in HANDSHAKE}
    crossed = [p for p in request.headers if p[0].decode().lower() not in names]
    want = [(name.lower().encode(), value.encode("latin-1")) for name, value in sent]
    assert crossed == [*want, (b"content-length", b"0")]
    assert request.values("connection") == [b"Upgrade"]
    assert request.values("upgrade") == [b"websocket"]
    assert request.values("sec-websocket-version") == [b"13"]
    [key] = request.values("sec-websocket-key")
    assert key.decode() != dict(HANDSHAKE)["Sec-WebSocket-Key"]
    assert request.values("via")[0].startswith(b"1.1 lastword-")
    assert request.values("x-forwarded-for") == [b"127.0.0.1"]
    assert request.values("x-forwarded-host") == [b"models.example.org"]
    assert len(request.values("x-request-id")) == 1


async def test_no_header_of_a_handshake_is_invented(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """Upstream gets no User-Agent and no Origin of a library; Host by the setting."""
    proxy = await lastword(upstream_host="upstream")
    fake.script(answer(403))
    await ask(proxy.url)
    names = {name.decode().lower() for name, _ in fake.requests[0].headers}
    assert names - OURS == {"host", *(name.lower() for name, _ in HANDSHAKE)}
    assert fake.requests[0].values("host") == [f"127.0.0.1:{fake.port}".encode()]


async def test_headers_of_an_agreement_come_down_as_they_were_sent(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """The 101 has upstream's own headers, the proof for the client's key, and a request id."""
    proxy = await lastword()
    sent = [("Set-Cookie", "a=1"), ("X-B", "J\xf6rg"), ("Set-Cookie", "b=2"), ("X-Request-Id", "r")]

    async def script(exchange: Exchange) -> None:
        await agree(exchange, [*sent, ("Keep-Alive", "timeout=5"), ("Content-Length", "0")])
        await exchange.gate("leave")
        await exchange.cut()

    fake.script(script)
    async with connect(proxy.url) as wire:
        await wire.request("GET", REALTIME, HANDSHAKE)
        got = await wire.head()
        assert got.status == 101
        key = dict(HANDSHAKE)["Sec-WebSocket-Key"]
        want = [
            (b"upgrade", b"websocket"),
            (b"connection", b"Upgrade"),
            (b"sec-websocket-accept", accept_key(key).encode()),
            *((name.encode(), value.encode("latin-1")) for name, value in sent),
        ]
        assert got.headers == want
        fake.gate("leave").open()
        await asyncio.wait_for(wire.reader.readuntil(b"was lost."), PATIENCE_S)


@pytest.mark.parametrize("status", [401, 403, 404, 307, 500])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
async def test_refusal_of_upstream_is_the_answer(
    status: int,
    chunked: bool,  # noqa: FBT001 -- a parameter of the test
    fake: FakeVllm,
    lastword: StartLastword,
) -> None:
    """Status, headers and body come down; a redirect is not followed."""
    proxy = await lastword()
    headers = [("www-authenticate", "Bearer"), ("location", "/elsewhere"), ("x-request-id", "up")]
    body = b'{"error":"no"}'

    async def refuse(exchange: Exchange) -> None:
        await exchange.respond(
            status, headers if chunked else [*headers, ("content-length", str(len(body)))]
        )
        await exchange.send(body)
        await exchange.end()

    fake.script(refuse)
    got = await ask(proxy.url)
    assert (got.status, got.body, got.ending) == (status, body, "clean")
    for name, value in headers:
        assert got.values(name) == [value.encode()]
    assert got.values("connection") == [b"close"]
    assert got.values("upgrade") == []
    assert len(fake.requests) == 1


@pytest.mark.parametrize("status", [200, 401, 403, 404, 405, 426, 500])
async def test_responses_over_a_websocket_are_426(
    status: int, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Whatever upstream answers but 101: Codex takes 426 alone as the word to go on by HTTP."""
    proxy = await lastword(path_prefix="/llm", background="proxy")
    fake.handler = answer(status, [*JSON, ("set-cookie", "a=1")])
    for target in ("/llm/v1/responses", "/llm/v1/%72esponses?x=1"):
        got = await ask(proxy.url, target)
        assert got.status == 426
        assert got.json()["error"]["code"] == 426
        assert got.values("upgrade") == [b"HTTP/1.1"]  # a 426 says to what (RFC 9110, 15.5.22)
        assert got.values("connection") == [b"upgrade, close"]
        assert got.values("set-cookie") == []
        assert len(got.values("x-request-id")) == 1
    for target in ("/v1/responses", "/llm/v1/responses/resp_1"):
        assert (await ask(proxy.url, target)).status == status


async def test_responses_over_a_websocket_where_upstream_has_them(
    no_task_left: None, lastword: StartLastword
) -> None:
    """An upstream that takes WebSockets on /v1/responses gets them."""
    async with websocket_upstream() as upstream:
        proxy = await lastword(upstream=upstream.url)
        async with dial(proxy, RESPONSES) as client:
            server = await upstream.accept()
            await server.send("yes")
            assert await client.recv() == "yes"


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        pytest.param(garbage, 502, "proper WebSocket handshake", id="garbage"),
        pytest.param(close_without_answer, 502, "proper WebSocket handshake", id="closed"),
        pytest.param(agree_badly(key="AAAAAAAAAAAAAAAAAAAAAA=="), 502, "proper", id="wrong key"),
        pytest.param(
            agree_badly([("Sec-WebSocket-Protocol", "c")]), 502, "proper", id="not offered"
        ),
        pytest.param(
            agree_badly([("Sec-WebSocket-Extensions", "permessage-deflate")]),
            502,
            "proper",
            id="deflate",
        ),
        pytest.param(hang, 504, "did not answer in time", id="silent"),
    ],
)
async def test_handshake_that_fails_upstream(
    script: Handler, status: int, said: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """It is an error of the proxy's own before the client was answered, not a WebSocket."""
    proxy = await lastword(upstream_idle_s=0.3 if script is hang else 30)
    fake.script(script)
    for target in (REALTIME, RESPONSES) if script is garbage else (REALTIME,):
        fake.handler = script
        got = await ask(proxy.url, target, [("Sec-WebSocket-Protocol", "a, b")])
        assert (got.status, got.json()["error"]["code"]) == (status, status)
        assert said in got.json()["error"]["message"]
    await fake.until(lambda: not fake.open)
    kind = "no_answer" if script is hang else "broken"
    failed = await total(proxy.admin_url, "lastword_upstream_errors_total", kind=kind)
    assert failed == (2 if script is garbage else 1)
    assert await total(proxy.admin_url, "lastword_upstream_errors_total") == failed


async def test_interim_answer_is_no_refusal(fake: FakeVllm, lastword: StartLastword) -> None:
    """A 1xx other than 101 is never sent down as the answer."""
    proxy = await lastword()

    async def hints(exchange: Exchange) -> None:
        await exchange.send_raw(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
        await exchange.wait_closed()

    fake.script(hints)
    assert (await ask(proxy.url)).status == 502


async def test_upstream_that_cannot_be_reached(fake: FakeVllm, lastword: StartLastword) -> None:
    """502, as for any request, also on /v1/responses: over HTTP it is not there either."""
    proxy = await lastword()
    await fake.stop_listening()
    for target in (REALTIME, RESPONSES):
        got = await ask(proxy.url, target)
        assert got.status == 502
        assert "cannot be reached" in got.json()["error"]["message"]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"Sec-WebSocket-Key": None}, id="no key"),
        pytest.param({"Sec-WebSocket-Key": "c2hvcnQ="}, id="short key"),
        pytest.param({"Sec-WebSocket-Version": "8"}, id="old version"),
        pytest.param({"Sec-WebSocket-Version": None}, id="no version"),
        pytest.param({"Sec-WebSocket-Protocol": "a b secret-key"}, id="no list of protocols"),
    ],
)
async def test_malformed_handshake_is_refused(
    change: dict[str, str | None], fake: FakeVllm, lastword: StartLastword
) -> None:
    """It is 400, says which version is spoken, quotes nothing, and goes nowhere."""
    proxy = await lastword()
    headers = {**dict(HANDSHAKE), **change}
    sent = [(name, value) for name, value in headers.items() if value is not None]
    got = await exchange(proxy.url, "GET", REALTIME, sent)
    assert got.status == 400
    assert got.values("sec-websocket-version") == [b"13"]
    assert b"secret-key" not in got.body
    assert fake.requests == []


@pytest.mark.parametrize("target", ["//host/x", "/v1/../metrics", "/v1/%2e%2e/metrics", "/a\\b"])
async def test_target_that_means_another_place_is_refused(
    target: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """The rules for targets hold for WebSockets too."""
    proxy = await lastword()
    assert (await ask(proxy.url, target)).status == 400
    assert fake.requests == []


async def test_loop_is_508(fake: FakeVllm, lastword: StartLastword) -> None:
    """A handshake that has been here before goes no further."""
    proxy = await lastword()
    fake.handler = answer(404)
    await ask(proxy.url)
    [via] = fake.requests[0].values("via")
    assert (await ask(proxy.url, headers=[("Via", via.decode())])).status == 508
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("method", "headers", "body"),
    [
        pytest.param("POST", [], b"{}", id="POST"),
        pytest.param("GET", [("Transfer-Encoding", "chunked")], None, id="with a body"),
        pytest.param("GET", [("Upgrade", "h2c")], None, id="another protocol"),
    ],
)
async def test_what_is_no_handshake_is_an_ordinary_request(
    method: str,
    headers: list[tuple[str, str]],
    body: bytes | None,
    fake: FakeVllm,
    lastword: StartLastword,
) -> None:
    """An upgrade that cannot be a WebSocket's is ignored, and the request goes up without it."""
    proxy = await lastword()
    fake.handler = answer(200)
    sent = [pair for pair in HANDSHAKE if pair[0] not in dict(headers)]
    async with connect(proxy.url) as wire:
        await wire.request(method, "/v1/models", [*sent, *headers], body)
        if body is None and headers[0][0] == "Transfer-Encoding":
            await wire.send(b"2\r\n{}\r\n0\r\n\r\n")
        assert (await wire.answer()).status == 200
    assert fake.requests[0].values("upgrade") == []
    assert fake.requests[0].method == method


async def test_client_that_leaves_during_the_handshake(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """Upstream's connection is closed at once, before it has answered."""
    proxy = await lastword()
    fake.script(hang)
    async with connect(proxy.url) as wire:
        await wire.request("GET", REALTIME, HANDSHAKE)
        asked = await fake.exchange()
        wire.leave()
        await asked.until_closed()


async def test_environment_proxies_are_not_used(
    fake: FakeVllm, lastword: StartLastword, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that the environment names gets no handshake."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "wss_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    proxy = await lastword()
    fake.script(answer(403))
    assert (await ask(proxy.url)).status == 403


async def test_connection_that_is_not_made_in_time(
    no_task_left: None, lastword: StartLastword
) -> None:
    """``connect_timeout_s`` counts for the TLS handshake too; then it is 504."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel connects, nobody answers
        port = silent.getsockname()[1]
        proxy = await lastword(upstream=f"https://127.0.0.1:{port}", connect_timeout_s=0.2)
        got = await ask(proxy.url)
        assert got.status == 504
        assert "did not accept a connection in time" in got.json()["error"]["message"]
