"""What a client and vLLM say to each other goes to no log, and to no other client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
from websockets.frames import Frame, Opcode
from websockets.utils import accept_key

from tests.e2e.process import lastword_process
from tests.e2e.websocket import HANDSHAKE, REALTIME
from tests.e2e.wire import RESPONSES, Answer, Cut, connect, exchange
from tests.fake_scripts import (
    EVENT_STREAM,
    JSON,
    answer,
    close_without_answer,
    event,
    hang,
    response_object,
    stream,
    vllm_events,
)
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import StartLastword
    from tests.fake_vllm import Exchange, FakeVllm, Handler

MARKED = re.compile(rb"hunter2-[a-z-]+")
"""Every secret of these tests says where it was sent."""
KEYS = [
    ("Authorization", "Bearer hunter2-authorization"),
    ("X-Api-Key", "hunter2-api-key"),
    ("Cookie", "session=hunter2-cookie"),
]
QUERY = "?key=hunter2-query"

# As loud as every logger of the process can be made from outside.
LOUD = """
import logging
from proxy import cli
from proxy.operations import logs
configure = logs.configure_logs
def loud(log_format, log_level):
    configure(log_format, log_level)
    known = logging.root.manager.loggerDict
    for name in (None, "uvicorn", "asyncio", "httpx", "websockets", "websockets.server", *known):
        if name != "lastword.websocket":
            logging.getLogger(name).setLevel(logging.DEBUG)
logs.configure_logs = loud
cli.main()
"""


def body(**members: Any) -> bytes:
    """Write a create request that is secret in every part but its names."""
    told = {
        "model": "hunter2-model",
        "input": "hunter2-input",
        "metadata": {"k": "hunter2-metadata"},
        "stream": True,
    }
    return json.dumps(told | members).encode()


def secret_events(status: str = "completed", **members: Any) -> list[bytes]:
    """Make a stream whose every part is secret but its names."""
    events = vllm_events(status, **members)
    return [one.replace(b"word", b"hunter2-delta-") for one in events]


async def garbage(exchange: Exchange) -> None:
    """Answer with no HTTP, and quote the request's key."""
    await exchange.read_body()
    await exchange.send_raw(b"HTTP/1.1 2x0 hunter2-status\r\nhunter2-name\r\n\r\nhunter2-body")
    await exchange.cut()


async def bad_chunk(exchange: Exchange) -> None:
    """Begin a stream, then break its framing."""
    await exchange.respond(200, EVENT_STREAM)
    await exchange.send(secret_events()[0])
    await exchange.send_raw(b"hunter2-chunk\r\n")
    await exchange.wait_closed()


async def bad_handshake(exchange: Exchange) -> None:
    """Agree to a WebSocket in a way that is none, quoting what was sent."""
    await exchange.send_raw(
        b"HTTP/1.1 101 Yes\r\nUpgrade: hunter2-upgrade\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: hunter2-accept\r\n\r\n"
    )
    await exchange.wait_closed()


def good_handshake(*frames: bytes) -> Handler:
    """Agree to a WebSocket, send these frames and cut the connection."""

    async def script(exchange: Exchange) -> None:
        [key] = exchange.request.values("sec-websocket-key")
        await exchange.send_raw(
            b"HTTP/1.1 101 Yes\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: %b\r\n\r\n" % accept_key(key.decode()).encode()
        )
        await exchange.send_raw(b"".join(frames))
        await exchange.cut()

    return script


FAILED = [
    event("response.created", 0, response=response_object("in_progress", "resp_f")),
    event("error", 1, code="hunter2-code", message="hunter2-message"),
]
NOT_UTF8 = b'event: response.completed\ndata: {"x":"\xff hunter2-broken"}\n\n'
EXCHANGES: list[tuple[str, Handler, str, str, bytes | None]] = [
    ("whole", stream(secret_events()), "POST", RESPONSES, body()),
    ("corrected", stream(secret_events("incomplete")), "POST", RESPONSES, body()),
    ("contradicts", stream([*secret_events()[:-1], NOT_UTF8]), "POST", RESPONSES, body()),
    ("cut", stream(secret_events()[:4], ending="cut"), "POST", RESPONSES, body()),
    ("reset", stream(secret_events()[:4], ending="reset"), "POST", RESPONSES, body()),
    ("silent", stream(secret_events()[:4], ending="hang"), "POST", RESPONSES, body()),
    ("long", stream(secret_events(padding=6000)), "POST", RESPONSES, body()),
    ("half", stream([secret_events()[0][:-9]], ending="cut"), "POST", RESPONSES, body()),
    ("error", stream(FAILED), "POST", RESPONSES, body()),
    ("chunk", bad_chunk, "POST", RESPONSES, body()),
    ("garbage", garbage, "POST", RESPONSES, body()),
    ("closed", close_without_answer, "POST", RESPONSES, body()),
    ("late", hang, "POST", RESPONSES, body()),
    ("400", answer(400, JSON, b'{"error":"hunter2-answer"}'), "POST", RESPONSES, body()),
    ("500", answer(500, JSON, b"hunter2-answer"), "POST", "/v1/hunter" + QUERY, b"hunter2-upload"),
    ("json", answer(400), "POST", RESPONSES, b'{"input":"hunter2-input", nonsense'),
    ("utf8", answer(400), "POST", RESPONSES, b'{"input":"hunter2-input\xff"}'),
    ("run", stream(secret_events(background=True)), "POST", RESPONSES, body(background=True)),
    ("lost", stream(secret_events()[:3], ending="cut"), "POST", RESPONSES, body(background=True)),
    ("junk", garbage, "POST", RESPONSES, body(background=True)),
    ("bad run", answer(400), "POST", RESPONSES, b'{"background":true,"input":"hunter2-input",'),
    ("id", answer(400), "POST", RESPONSES, body(background=True, request_id="hunter2-id \n!")),
    ("large", answer(400), "POST", RESPONSES, b"hunter2-large" * 10_000),
    ("copy", answer(404), "GET", RESPONSES + "/resp_none" + QUERY + "&stream=true", None),
    ("cancel", answer(404), "POST", RESPONSES + "/resp_none/cancel" + QUERY, b"hunter2-body"),
    ("target", answer(404), "GET", "/v1/../hunter2-path" + QUERY, None),
]
OURS = {"garbage", "closed", "late", "junk", "id", "large", "target"}
"""Those that the proxy answers itself, where it has answered at all."""


async def tell(url: str, method: str, target: str, sent: bytes | None) -> Answer | None:
    """Send a secret request; the answer, or None if there was none."""
    headers = [("Content-Type", "application/json"), *KEYS]
    try:
        return await exchange(url, method, target, headers, sent)
    except (Cut, ConnectionError):
        return None


async def tell_by_websocket(fake: FakeVllm, url: str) -> None:
    """Say secrets in handshakes and frames that go well and wrong."""
    text = Frame(Opcode.TEXT, b"hunter2-frame").serialize(mask=False)
    headers = [*HANDSHAKE, *KEYS, ("Sec-WebSocket-Protocol", "hunter2-subprotocol")]
    for script in (
        good_handshake(text, text),
        good_handshake(text, b"\xffhunter2-no-frame"),
        bad_handshake,
        garbage,
        answer(403, JSON, b"hunter2-answer"),
    ):
        fake.script(script)
        async with connect(url) as wire:
            await wire.request("GET", REALTIME + QUERY, headers)
            await wire.head()
            async with asyncio.timeout(PATIENCE_S):
                with contextlib.suppress(ConnectionError):  # some have been cut off already
                    await wire.send(Frame(Opcode.TEXT, b"hunter2-frame").serialize(mask=True))
                    await wire.send(b"\xffhunter2-no-frame")
                    await wire.reader.read()
    bad = [pair for pair in headers if pair[0] != "Sec-WebSocket-Protocol"]
    got = await exchange(
        url, "GET", REALTIME, [*bad, ("Sec-WebSocket-Protocol", "hunter2-bad protocol")]
    )
    assert (got.status, MARKED.findall(got.body)) == (400, [])


@pytest.mark.parametrize(
    ("background", "log_format"),
    [("pass", "json"), ("proxy", "json"), ("upstream", "json"), ("auto", "console")],
)
async def test_no_secret_is_told(
    background: str, log_format: str, fake: FakeVllm, tmp_path: Path
) -> None:
    """Not in logs, metrics, settings or errors, however loud the log and whatever goes wrong."""
    limits: dict[str, Any] = {
        "upstream_idle_s": 0.3,
        "upstream_down_s": 0.2,
        "max_request_body_bytes": 100_000,
        "max_event_bytes": 5000,
    }
    log = {"log_format": log_format, "log_level": "debug"}
    settings = limits | log | {"background": background}
    if background != "pass":
        settings["store"] = f"sqlite:{tmp_path}/copies.db"
    async with lastword_process(fake.url, command=("-c", LOUD), **settings) as proxy:
        for name, script, method, target, sent in EXCHANGES:
            fake.handler = script
            got = await tell(proxy.url, method, target, sent)
            if got is not None and name in OURS and got.status != 200:
                assert MARKED.findall(got.body) == [], name
        await tell_by_websocket(fake, proxy.url)
        async with connect(proxy.url) as wire:
            await wire.send(b"GET /hunter2-line HTTP/9\r\nhunter2-header\r\n\r\n")
            assert MARKED.findall((await wire.answer()).body) == []
        for page in ("/metrics", "/config", "/readyz"):
            told = await exchange(proxy.admin_url, "GET", page, KEYS)
            assert (told.status, MARKED.findall(told.body)) == (200, [])
        fake.handler = answer(500, JSON, b"hunter2-answer")
        assert (await exchange(proxy.admin_url, "POST", "/drain", KEYS, b"")).status == 200
        got = await exchange(proxy.url, "POST", RESPONSES + QUERY, KEYS, body())
        assert (got.status, MARKED.findall(got.body)) == (503, [])
        fake.handler = hang  # what still runs upstream ends with the proxy
    assert b"ready" in proxy.said
    assert b"lost" in proxy.said
    assert MARKED.findall(bytes(proxy.said)) == []
    files = b"".join([path.read_bytes() for path in tmp_path.iterdir()])  # noqa: ASYNC240
    assert (b"hunter2-delta" in files) == (background != "pass"), "bodies are kept, by design"
    for key in MARKED.findall(repr(KEYS).encode()):
        assert key not in files


@pytest.mark.parametrize("log_format", ["json", "console"])
async def test_traceback_shows_no_values(log_format: str) -> None:
    """A fault of the proxy's own is logged with its place, not with what the variables held."""
    fault = f"""
import structlog
from proxy.operations.logs import configure_logs
configure_logs({log_format!r})
def fail(held):
    held.missing
try:
    fail({{"authorization": "-".join(["hunter2", "local"])}})
except AttributeError:
    structlog.stdlib.get_logger("lastword").exception("failed")
"""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", fault), stderr=asyncio.subprocess.PIPE
    )
    _, said = await child.communicate()
    assert b"AttributeError" in said
    assert MARKED.findall(said) == []


async def test_clients_that_share_connections_share_nothing_else(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """Two clients in turn on one pooled connection: each sends its own keys and gets its own."""
    proxy = await lastword(upstream=f"http://localhost:{fake.port}")

    async def answer_with_cookie(exchange: Exchange) -> None:
        await exchange.read_body()
        who = exchange.request.values("x-who")[0].decode()
        await exchange.answer(200, [*JSON, ("set-cookie", f"session={who}")], who.encode())

    fake.handler = answer_with_cookie
    async with connect(proxy.url) as alice, connect(proxy.url) as bob:
        for turn in range(6):
            for wire, who in [(alice, "alice"), (bob, "bob")]:
                keys = [("Authorization", who), ("Cookie", f"own={who}")] if turn % 2 else []
                target = RESPONSES if turn % 3 else "/v1/models"
                await wire.request("POST", target, [("X-Who", who), *keys], b"{}")
                got = await wire.answer()
                assert got.body == who.encode()
                assert got.values("set-cookie") == [f"session={who}".encode()]
                asked = fake.requests[-1]
                assert asked.values("authorization") == ([who.encode()] if keys else [])
                assert asked.values("cookie") == ([f"own={who}".encode()] if keys else [])
    assert fake.connections == 1, "the test is about a shared connection"
