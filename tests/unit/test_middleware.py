"""The middleware, driven by hand: what comes out of its ``send``, and what it leaves alone."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prometheus_client
import pytest

from proxy import middleware
from proxy.middleware import Lastword, UnfinishedStreamError
from tests.captures import Capture, corrected, event_streams, load
from tests.sse import cut, one_by_one

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT = Path(__file__).parents[2]
EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
CREATED = (
    b'event: response.created\ndata: {"response":{"id":"r1","model":"m","status":"in_progress"},'
    b'"sequence_number":0,"type":"response.created"}\n\n'
)
DELTA = (
    b'event: response.output_text.delta\ndata: {"delta":"a","sequence_number":%d,'
    b'"type":"response.output_text.delta"}\n\n'
)
WRONG = (
    b'event: response.completed\ndata: {"response":{"id":"r1","model":"m","status":"incomplete"},'
    b'"sequence_number":3,"type":"response.completed"}\n\n'
)
RIGHT = WRONG.replace(b"response.completed", b"response.incomplete")
STREAM = CREATED + DELTA % 1 + DELTA % 2 + WRONG
DONE = b"data: [DONE]\n\n"

Message = dict[str, Any]


class Broken(Exception):  # noqa: N818 -- what happened
    """What an application raises."""


class Wrapped:
    """An application of fixed messages inside the middleware, and what came out of it.

    ``messages`` are sent in order; an exception among them is raised in its place.
    """

    def __init__(self, *messages: Message | BaseException) -> None:
        self.messages = messages
        self.sent: list[Any] = []
        self.seen: tuple[Any, Any, Any] | None = None
        self.finished = False

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Play the messages."""
        self.seen = (scope, receive, send)
        for message in self.messages:
            if isinstance(message, BaseException):
                raise message
            await send(message)
        self.finished = True

    async def receive(self) -> Message:
        """Give nothing; nobody asks."""
        raise AssertionError

    async def send(self, message: Any) -> None:
        """Keep what comes out."""
        self.sent.append(message)

    async def run(self, scope: Message) -> Message:
        """Send one request through a new middleware; returns the scope."""
        await Lastword(self.app)(scope, self.receive, self.send)
        return scope

    @property
    def body(self) -> bytes:
        """The bytes that went out."""
        return b"".join(m.get("body", b"") for m in self.sent if m["type"] == "http.response.body")

    @property
    def ended(self) -> bool:
        """Whether the body that went out was ended."""
        return any(
            m["type"] == "http.response.body" and not m.get("more_body", False) for m in self.sent
        )


def request(
    method: str = "POST",
    path: str = "/v1/responses",
    headers: Sequence[tuple[bytes, bytes]] = (),
    **more: Any,
) -> Message:
    """Make the scope of a request."""
    return {"type": "http", "method": method, "path": path, "headers": list(headers), **more}


def head(status: int = 200, headers: Iterable[tuple[bytes, bytes]] = EVENT_STREAM) -> Message:
    """Make the message that starts an answer."""
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(body: bytes, *, more: bool = True) -> Message:
    """Make a message with a part of the body."""
    return {"type": "http.response.body", "body": body, "more_body": more}


END = part(b"", more=False)


def counted(name: str, **labels: str) -> float:
    """Read a counter where vLLM's /metrics reads it."""
    return prometheus_client.REGISTRY.get_sample_value(name, labels) or 0


# --- the terminal rule, whole events ---------------------------------------------------------


async def test_truncated_stream_ends_with_incomplete() -> None:
    """Each event goes out as it comes, the last one under its right name."""
    wrapped = Wrapped(head(), *map(part, (CREATED, DELTA % 1, DELTA % 2, WRONG)), END)
    await wrapped.run(request())
    assert [m.get("body") for m in wrapped.sent] == [
        *(None, CREATED, DELTA % 1, DELTA % 2, RIGHT, b"")
    ]
    assert wrapped.sent[-1] == END


async def test_whole_events_go_out_when_they_are_whole() -> None:
    """A message with a part of an event sends what was whole before it, or nothing."""
    wrapped = Wrapped(
        *(head(), part(CREATED[:20]), part(CREATED[20:] + DELTA[:9]), part(DELTA[9:] % 1)),
        *(part(WRONG[:-1]), part(WRONG[-1:]), END),
    )
    await wrapped.run(request())
    assert [m["body"] for m in wrapped.sent[1:]] == [CREATED, DELTA % 1, RIGHT, b""]


async def test_what_needs_no_change_goes_out_as_the_object_that_came() -> None:
    """Neither the head nor a message of whole events is copied."""
    messages = [head(), part(CREATED), part(DELTA % 1)]
    wrapped = Wrapped(*messages, part(WRONG), END)
    await wrapped.run(request())
    sent = [wrapped.sent[0], wrapped.sent[2]]
    assert all(out is came for out, came in zip(sent, [messages[0], messages[2]], strict=True))


@pytest.mark.parametrize("last", [b"", WRONG, WRONG[:-2]])
async def test_last_message_may_carry_events(last: bytes) -> None:
    """What comes with the end of the body is corrected, without its blank line too."""
    before = STREAM if not last else STREAM.removesuffix(WRONG)
    wrapped = Wrapped(head(), part(before), {"type": "http.response.body", "body": last})
    await wrapped.run(request())
    assert wrapped.body == STREAM.removesuffix(WRONG) + RIGHT
    assert wrapped.ended


async def test_after_the_terminal_event_only_done_and_comments_pass() -> None:
    """Other events behind the terminal one are dropped and counted."""
    before = counted("lastword_dropped_events_total")
    wrapped = Wrapped(head(), part(STREAM + DELTA % 4), part(b": bye\n\n"), part(DONE), END)
    await wrapped.run(request())
    assert wrapped.body == STREAM.removesuffix(WRONG) + RIGHT + b": bye\n\n" + DONE
    assert counted("lastword_dropped_events_total") == before + 1


async def test_head_loses_its_length_and_nothing_else() -> None:
    """A corrected body may have another length."""
    pairs = ((b"X-A", b"1"), *EVENT_STREAM, (b"Content-Length", b"9"), (b"X-A", b"2"))
    wrapped = Wrapped(head(headers=pairs), part(STREAM), END)
    await wrapped.run(request())
    assert wrapped.sent[0]["headers"] == [(b"X-A", b"1"), *EVENT_STREAM, (b"X-A", b"2")]


async def test_body_may_be_a_memoryview() -> None:
    """Starlette lets applications send one."""
    wrapped = Wrapped(head(), part(memoryview(STREAM)), END)  # type: ignore[arg-type]
    await wrapped.run(request())
    assert wrapped.body.endswith(RIGHT)


@pytest.mark.parametrize("capture", event_streams(), ids=lambda capture: capture.id)
async def test_every_capture_however_it_is_cut(capture: Capture) -> None:
    """What real vLLMs streamed comes out as the rule says, and ends as it should."""
    body = capture.body
    expected = corrected(body) if capture.is_truncated else body
    expected = expected[: expected.rfind(b"\n\n") + 2] if expected else b""
    ends = capture.curl_exit == 0
    randomness = random.Random(capture.id)
    for chunks in (
        [body],
        capture.events,
        one_by_one(body) if len(body) < 3_000 else [body],
        *(
            cut(body, *randomness.sample(range(len(body) + 1), k=min(5, len(body))))
            for _ in range(5)
        ),
    ):
        wrapped = Wrapped(head(), *map(part, chunks), END if ends else Broken())
        if ends:
            await wrapped.run(request(capture.method, capture.target.partition("?")[0]))
            assert wrapped.body == expected
        else:
            with pytest.raises(Broken):
                await wrapped.run(request())
            assert wrapped.body.startswith(expected)
            failure = wrapped.body.removeprefix(expected)
            created = b"event: response.created\n" in expected
            assert failure.startswith(b"event: response.failed\n") is created
        assert wrapped.ended is ends
        for message in wrapped.sent[1:]:
            assert not message["body"] or message["body"].endswith(b"\n\n")


async def test_capture_cut_at_every_place() -> None:
    """A cut at any byte changes nothing."""
    body = load("0.32.0", "a3_stream_truncated_one_token").body
    for place in range(len(body)):
        wrapped = Wrapped(head(), part(body[:place]), part(body[place:], more=False))
        await wrapped.run(request())
        assert wrapped.body == corrected(body)


# --- what is looked at ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "lifespan"},
        {"type": "websocket", "path": "/v1/responses", "headers": []},
        request(path="/v1/chat/completions"),
        request(path="/v1/responses/r1/cancel"),
        request(path="/v1/responses/"),
        request("DELETE", "/v1/responses/r1"),
        request("GET"),
        request("POST", "/v1/responses/r1"),
        request("GET", "/v1/responses/a/b"),
        request(path="/api/v1/responses"),
        request("HEAD", "/v1/responses/r1"),
        request(headers=[(b"lastword-correct", b"off")]),
        request(path="/elsewhere", headers=[(b"lastword-correct", b"nonsense")]),
    ],
    ids=str,
)
async def test_everything_else_passes_by_reference(scope: Message) -> None:
    """The application gets the very scope, receive and send that the server gave."""
    wrapped = Wrapped()
    receive, send = wrapped.receive, wrapped.send
    await Lastword(wrapped.app)(scope, receive, send)
    assert wrapped.seen
    assert all(got is gave for got, gave in zip(wrapped.seen, (scope, receive, send), strict=True))


@pytest.mark.parametrize(
    "scope",
    [
        request("GET", "/v1/responses/resp_1"),
        request("GET", "/v1/responses/a b"),
        request(path="/api/v1/responses", root_path="/api"),
        request(path="/v1/responses", root_path="/api"),
        request("GET", "/api/v1/responses/r1", root_path="/api"),
    ],
    ids=str,
)
async def test_routes_that_are_looked_at(scope: Message) -> None:
    """Create and retrieve, also behind a ``root_path``; scope and receive are the server's."""
    wrapped = Wrapped(head(), part(STREAM), END)
    receive = wrapped.receive
    await Lastword(wrapped.app)(scope, receive, wrapped.send)
    assert wrapped.body.endswith(RIGHT)
    assert wrapped.seen
    assert wrapped.seen[0] is scope
    assert wrapped.seen[1] is receive


async def test_path_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """``LASTWORD_PATH_PREFIX`` says what stands before the routes, as for the proxy."""
    monkeypatch.setenv("LASTWORD_PATH_PREFIX", "/llm")
    for path, end in (("/llm/v1/responses", RIGHT), ("/v1/responses", WRONG)):
        wrapped = Wrapped(head(), part(STREAM), END)
        await wrapped.run(request(path=path))
        assert wrapped.body.endswith(end)


@pytest.mark.parametrize(
    "start",
    [
        head(500),
        head(301),
        head(headers=[(b"content-type", b"application/json")]),
        head(headers=[]),
        {"type": "http.response.start", "status": 200},
        head(headers=[*EVENT_STREAM, (b"content-encoding", b"gzip"), (b"content-length", b"9")]),
    ],
    ids=str,
)
async def test_other_answers_pass_by_reference(start: Message) -> None:
    """Errors, other types and compressed streams leave as the messages that came."""
    messages = [start, part(b"half"), part(STREAM), END]
    wrapped = Wrapped(*messages)
    await wrapped.run(request())
    assert all(out is came for out, came in zip(wrapped.sent, messages, strict=True))


async def test_compressed_stream_is_counted() -> None:
    """It passes uncorrected, and the metrics say so."""
    before = counted("lastword_compressed_streams_total", coding="passed")
    await Wrapped(head(headers=[*EVENT_STREAM, (b"content-encoding", b"br")]), END).run(request())
    assert counted("lastword_compressed_streams_total", coding="passed") == before + 1


async def test_other_messages_pass_in_their_place() -> None:
    """Early hints, trailers and what servers add are not the middleware's business."""
    hint, trailers = {"type": "http.response.early_hint"}, {"type": "http.response.trailers"}
    wrapped = Wrapped(hint, head(), part(STREAM), END, trailers)
    await wrapped.run(request())
    assert wrapped.sent[0] is hint
    assert wrapped.sent[-1] is trailers
    assert wrapped.sent[-2] == END


# --- the switch -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "header", "corrects"),
    [
        (None, None, True),
        ("on", None, True),
        ("observe", None, False),
        ("off", None, False),
        ("off", b"on", True),
        ("observe", b" ON ", True),
        ("on", b"observe", False),
        ("on", b"off", False),
    ],
)
async def test_switch(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, header: bytes | None, *, corrects: bool
) -> None:
    """The header of a request counts over the environment."""
    if setting:
        monkeypatch.setenv("LASTWORD_CORRECT", setting)
    headers = [(b"lastword-correct", b"nonsense"), (b"Lastword-Correct", header)] if header else []
    messages = [head(), part(CREATED[:9]), part(CREATED[9:]), part(WRONG), END]
    wrapped = Wrapped(*messages)
    await wrapped.run(request(headers=headers))
    assert wrapped.body == CREATED + (RIGHT if corrects else WRONG)
    if not corrects:
        assert all(out is came for out, came in zip(wrapped.sent, messages, strict=True))


async def test_unknown_header_value_is_400() -> None:
    """It is refused in OpenAI's shape, and the application is not asked."""
    wrapped = Wrapped(head(), END)
    await wrapped.run(request(headers=[(b"lastword-correct", b"yes")]))
    start, body = wrapped.sent
    assert wrapped.seen is None
    assert start["status"] == 400
    assert dict(start["headers"]) == {
        b"content-type": b"application/json",
        b"content-length": b"%d" % len(body["body"]),
    }
    assert not body["more_body"]
    assert json.loads(body["body"]) == {
        "error": {
            "message": "The header Lastword-Correct must be on, observe or off.",
            "type": "invalid_request_error",
            "param": "Lastword-Correct",
            "code": 400,
        }
    }


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (
            "LASTWORD_CORRECT",
            "obseve",
            "LASTWORD_CORRECT must be on, observe or off, not 'obseve'.",
        ),
        ("LASTWORD_CORRECT", "", "LASTWORD_CORRECT must be on, observe or off, not ''."),
        (
            "LASTWORD_ON_LOST_UPSTREAM",
            "cut",
            "LASTWORD_ON_LOST_UPSTREAM must be failed_cut, failed or abort, not 'cut'.",
        ),
        (
            "LASTWORD_PATH_PREFIX",
            "llm/",
            (
                "LASTWORD_PATH_PREFIX must begin with a slash and not end with one, such as /llm,"
                " not 'llm/'."
            ),
        ),
    ],
)
def test_wrong_setting_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str
) -> None:
    """A wrong value raises at construction and says what is allowed."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r".") as raised:
        Lastword(Wrapped().app)
    assert str(raised.value) == sentence


# --- the end --------------------------------------------------------------------------------


def failure(message: str, number: int = 2) -> bytes:
    """Write the event that ends a stream that was lost."""
    error = json.dumps({"code": "server_error", "message": message}, separators=(",", ":"))
    return (
        b'event: response.failed\ndata: {"response":{"id":"r1","model":"m","status":"failed",'
        b'"error":%b},"sequence_number":%d,"type":"response.failed"}\n\n' % (error.encode(), number)
    )


RAISED = "The server failed before the response was finished; its log says why."
ENDED = "The server ended the stream before the response was finished."
ENDINGS = [("failed_cut", True, False), ("failed", True, True), ("abort", False, False)]


@pytest.mark.parametrize(("setting", "told", "clean"), ENDINGS)
async def test_application_that_raises_after_the_head(
    monkeypatch: pytest.MonkeyPatch, setting: str, *, told: bool, clean: bool
) -> None:
    """The client gets ``response.failed`` as the setting says, the server the exception."""
    monkeypatch.setenv("LASTWORD_ON_LOST_UPSTREAM", setting)
    error = Broken("logit_bias")
    wrapped = Wrapped(head(), part(CREATED + DELTA % 1 + DELTA[:30]), error)
    with pytest.raises(Broken) as raised:
        await wrapped.run(request())
    assert raised.value is error
    assert wrapped.body == CREATED + DELTA % 1 + (failure(RAISED) if told else b"")
    assert wrapped.ended is clean


@pytest.mark.parametrize(("setting", "told", "clean"), ENDINGS)
async def test_application_that_ends_without_a_terminal_event(
    monkeypatch: pytest.MonkeyPatch, setting: str, *, told: bool, clean: bool
) -> None:
    """The same, and the cut comes when the application is through, not in its ``send``."""
    monkeypatch.setenv("LASTWORD_ON_LOST_UPSTREAM", setting)
    wrapped = Wrapped(head(), part(CREATED), part(DELTA % 1 + DELTA[:30], more=False))
    if clean:
        await wrapped.run(request())
    else:
        with pytest.raises(UnfinishedStreamError):
            await wrapped.run(request())
    assert wrapped.finished
    assert wrapped.body == CREATED + DELTA % 1 + (failure(ENDED) if told else b"")
    assert wrapped.ended is clean


async def test_error_event_says_why() -> None:
    """After an ``error`` event of the application's own its words are the failure's."""
    error = b'event: error\ndata: {"type":"error","code":"boom","message":"why"}\n\n'
    wrapped = Wrapped(head(), part(CREATED + error), END)
    with pytest.raises(UnfinishedStreamError):
        await wrapped.run(request())
    assert b'"error":{"code":"boom","message":"why"}' in wrapped.body


@pytest.mark.parametrize("begun", [b"", b": hello\n\n", DELTA % 1, CREATED[:30]])
async def test_nothing_can_fail_before_the_response_was_created(begun: bytes) -> None:
    """Then the stream is cut, after what was whole."""
    wrapped = Wrapped(head(), part(begun), END)
    with pytest.raises(UnfinishedStreamError):
        await wrapped.run(request())
    assert wrapped.body == (begun if begun.endswith(b"\n\n") else b"")
    assert not wrapped.ended


async def test_replay_of_nothing_is_no_fault() -> None:
    """A cursor at the end of a finished response is answered with an empty stream."""
    wrapped = Wrapped(head(), END)
    await wrapped.run(request("GET", "/v1/responses/r1"))
    assert wrapped.body == b""
    assert wrapped.ended
    half = Wrapped(head(), part(CREATED[:30]), END)
    with pytest.raises(UnfinishedStreamError):
        await half.run(request("GET", "/v1/responses/r1"))
    assert half.body == b""
    assert not half.ended


async def test_exception_before_the_head_passes() -> None:
    """Whoever is outside answers it; nothing was sent."""
    wrapped = Wrapped(Broken())
    with pytest.raises(Broken):
        await wrapped.run(request())
    assert wrapped.sent == []


async def test_exception_after_the_terminal_event() -> None:
    """The client has its end: the body is finished, and the exception raised on."""
    wrapped = Wrapped(head(), part(STREAM), Broken())
    with pytest.raises(Broken):
        await wrapped.run(request())
    assert wrapped.body.endswith(RIGHT)
    assert wrapped.ended


async def test_exception_after_the_body() -> None:
    """Nothing is sent behind the end, whose cut is the exception, as that of a background task."""
    for stream in (STREAM, CREATED):
        wrapped = Wrapped(head(), part(stream), END, Broken())
        with pytest.raises(Broken):
            await wrapped.run(request())
        assert wrapped.ended is (stream is STREAM)
        assert wrapped.body.count(b"event: response.failed") == (stream is CREATED)


async def test_observed_stream_ends_as_the_application_ends_it() -> None:
    """With ``observe`` neither an event nor a cut is the middleware's own."""
    for last in (Broken(), END):
        wrapped = Wrapped(head(), part(CREATED[:-5]), last)
        try:
            await wrapped.run(request(headers=[(b"lastword-correct", b"observe")]))
        except Broken:
            assert last is not END
        assert wrapped.body == CREATED[:-5]
        assert wrapped.ended is (last is END)


async def test_cancellation_passes() -> None:
    """A server that cancels the request gets its cancellation, and no event is sent."""
    wrapped = Wrapped(head(), part(CREATED), asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await wrapped.run(request())
    assert wrapped.body == CREATED


async def test_application_that_returns_without_an_end() -> None:
    """So Starlette does when the client has left: no exception is made of it."""
    wrapped = Wrapped(head(), part(CREATED))
    await wrapped.run(request())
    assert wrapped.body == CREATED + failure(ENDED, 1)
    assert not wrapped.ended


async def test_send_of_a_client_that_left() -> None:
    """What the application makes of its failing ``send`` is what the server gets."""

    class Leaving(Wrapped):
        async def app(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                await super().app(scope, receive, send)
            except OSError:
                raise Broken from None  # as Starlette's ClientDisconnect

        async def send(self, message: Any) -> None:
            if len(self.sent) == 2:  # head and CREATED
                raise OSError
            self.sent.append(message)

    wrapped = Leaving(head(), part(CREATED), part(DELTA % 1))
    with pytest.raises(Broken):
        await wrapped.run(request())


# --- the counters ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["on", "observe"])
async def test_corrections_are_counted(mode: str) -> None:
    """Once per stream, before its end goes out, so that whoever saw the end sees the count."""
    labels = {"from": "response.completed", "to": "response.incomplete", "mode": mode}
    before = counted("lastword_corrections_total", **labels)
    at_the_end: list[float] = []

    class Counting(Wrapped):
        async def send(self, message: Any) -> None:
            if message == END:
                at_the_end.append(counted("lastword_corrections_total", **labels))

    await Counting(head(), part(STREAM), END).run(
        request(headers=[(b"lastword-correct", mode.encode())])
    )
    assert at_the_end == [before + 1]
    assert counted("lastword_corrections_total", **labels) == before + 1


async def test_client_that_leaves_after_the_terminal_event_is_counted() -> None:
    """Its stream was a completed one."""
    labels = {"from": "response.completed", "to": "response.incomplete", "mode": "on"}
    before = counted("lastword_corrections_total", **labels)
    with pytest.raises(asyncio.CancelledError):
        await Wrapped(head(), part(STREAM), asyncio.CancelledError()).run(request())
    assert counted("lastword_corrections_total", **labels) == before + 1


async def test_contradictions_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A completed event whose payload says something else passes untouched."""
    odd = WRONG.replace(b"incomplete", b"queued")
    before = counted("lastword_contradictions_total")
    wrapped = Wrapped(head(), part(CREATED + odd), END)
    await wrapped.run(request())
    assert wrapped.body == CREATED + odd
    assert counted("lastword_contradictions_total") == before + 1
    assert [record.getMessage() for record in caplog.records] == [
        "The terminal event says completed and its payload queued: r1"
    ]


async def test_stream_that_failed_is_no_correction() -> None:
    """An end of the middleware's own is none."""
    before = counted_corrections()
    with pytest.raises(Broken):
        await Wrapped(head(), part(CREATED), Broken()).run(request())
    assert counted_corrections() == before


def counted_corrections() -> float:
    """All corrections, whatever their labels."""
    return sum(
        sample.value
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "lastword_corrections_total"
    )


async def test_names_that_someone_else_registered(caplog: pytest.LogCaptureFixture) -> None:
    """A second registration, as after a reload, is said once and does not fail."""
    Lastword(Wrapped().app)
    Lastword(Wrapped().app)
    assert not caplog.records
    middleware._counters.cache_clear()
    try:
        wrapped = Wrapped(head(), part(STREAM), END)
        await wrapped.run(request())
        await wrapped.run(request())
        assert wrapped.body.count(RIGHT) == 2
        said = [record.getMessage().split(":")[0] for record in caplog.records]
        assert said == [f"The counter {name} is not shown" for name in middleware._COUNTERS]
    finally:
        middleware._counters.cache_clear()
        collectors = prometheus_client.REGISTRY._names_to_collectors
        for name in middleware._COUNTERS:
            prometheus_client.REGISTRY.unregister(collectors[name])
        middleware._counters()


# --- what it needs --------------------------------------------------------------------------

DRIVE = """
import asyncio, sys
{before}
from proxy.middleware import Lastword
{after}
sent = []
async def app(scope, receive, send):
    await send({{"type": "http.response.start", "status": 200,
                "headers": [(b"content-type", b"text/event-stream")]}})
    await send({{"type": "http.response.body", "body": {stream!r}}})
async def send(message):
    sent.append(message)
scope = {{"type": "http", "method": "POST", "path": "/v1/responses", "headers": []}}
asyncio.run(Lastword(app)(scope, None, send))
assert sent[-1]["body"].endswith({right!r}), sent
"""
STRANGERS = {
    *("fastapi", "starlette", "httpx", "structlog", "pydantic", "pydantic_settings", "uvicorn"),
    *("typer", "rich", "httptools", "uvloop", "prometheus_client"),
}


def drive(before: str = "", after: str = "", **environment: str) -> str:
    """Correct one stream in a fresh interpreter; returns what it printed."""
    script = DRIVE.format(before=before, after=after, stream=STREAM, right=RIGHT)
    run = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_import_loads_nothing_of_the_proxy_s() -> None:
    """It loads in an image that has msgspec and nothing else of what the proxy needs."""
    loaded = set(drive(after="print(*sys.modules)").split())
    assert not loaded & STRANGERS
    rooms = {name.split(".")[1] for name in loaded if name.startswith("proxy.")}
    assert rooms == {"core", "middleware"}


def test_works_without_prometheus_client() -> None:
    """Without it nothing is counted, and the streams are corrected all the same."""
    drive(before="sys.modules['prometheus_client'] = None")


def test_counters_are_shown_in_multiprocess_mode(tmp_path: Path) -> None:
    """Through files, the counters of several API servers are added up."""
    drive(PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    drive(PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    registry = prometheus_client.CollectorRegistry()
    from prometheus_client import multiprocess  # noqa: PLC0415 - it looks for the directory

    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]
    labels = {"from": "response.completed", "to": "response.incomplete", "mode": "on"}
    assert registry.get_sample_value("lastword_corrections_total", labels) == 2
