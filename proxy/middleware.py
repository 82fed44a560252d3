"""The corrector inside someone else's ASGI application, such as vLLM's own API server.

``vllm serve MODEL --middleware proxy.middleware.Lastword``

It applies the rules of ``proxy/core`` to the event streams of ``POST /v1/responses`` and
``GET /v1/responses/{id}``; everything else passes by reference.  It needs the standard library and
msgspec, which is in every vLLM image, and uses prometheus-client where it is installed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from proxy.core.corrector import Corrector, Mode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping

    from prometheus_client import Counter

    Scope = MutableMapping[str, Any]
    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    Application = Callable[[Scope, Receive, Send], Awaitable[None]]
    Headers = Iterable[tuple[bytes, bytes]]

__all__ = ["Lastword", "OnLost", "UnfinishedStreamError"]

_EVENT_STREAM = b"text/event-stream"
_SUCCESS = range(200, 300)
_RAISED = "The server failed before the response was finished; its log says why."
_ENDED = "The server ended the stream before the response was finished."

log = logging.getLogger("lastword")


class OnLost(StrEnum):
    """How a stream ends that the application does not end."""

    FAILED_CUT = "failed_cut"
    FAILED = "failed"
    ABORT = "abort"


class UnfinishedStreamError(RuntimeError):
    """The application ended a stream without its terminal event.

    It is raised to the server, which logs it and cuts the connection: ASGI has no other cut.
    """


class Lastword:
    """Wrap an ASGI application, so that its Responses streams end as their status says.

    It is set by the environment, as the proxy is: ``LASTWORD_CORRECT`` (``on``, ``observe``,
    ``off``), ``LASTWORD_ON_LOST_UPSTREAM`` (``failed_cut``, ``failed``, ``abort``),
    ``LASTWORD_PATH_PREFIX``.  A wrong value raises ``ValueError``.
    """

    def __init__(self, app: Application) -> None:
        self.app = app
        self._correct, self._on_lost, self._paths = _settings()
        _counters()  # so that they show before the first stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, websocket or lifespan."""
        if not self._looked_at(scope):
            await self.app(scope, receive, send)
            return
        try:
            mode = _requested_mode(scope["headers"], self._correct)
        except ValueError as error:
            await _refuse(send, str(error))
            return
        if mode is Mode.OFF:
            await self.app(scope, receive, send)
            return
        stream = _Stream(send, mode, self._on_lost, may_be_empty=scope["method"] == "GET")
        try:
            await self.app(scope, receive, stream.send)
        except Exception:
            await stream.close(_RAISED)
            raise
        else:
            # Without the end of its body: mostly because the client left, which costs nothing here.
            await stream.close(_ENDED)
        finally:
            stream.count()
        if stream.cut:
            raise UnfinishedStreamError(_ENDED)

    def _looked_at(self, scope: Scope) -> bool:
        """Whether this is ``POST /v1/responses`` or ``GET /v1/responses/{id}``."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "GET"):
            return False
        match = self._paths.match(_route_path(scope))
        return match is not None and (match[1] is None) == (scope["method"] == "POST")


class _Stream:
    """One answer on its way to the client; ``send`` is what the application gets."""

    __slots__ = ("_corrector", "_counted", "_empty", "_ended", "_mode", "_on_lost", "_send", "cut")

    def __init__(self, send: Send, mode: Mode, on_lost: OnLost, *, may_be_empty: bool) -> None:
        self._send = send
        self._mode = mode
        self._on_lost = on_lost
        self._empty = may_be_empty  # so far; to a cursor at its end a replay is nothing, rightly
        self._corrector: Corrector | None = None  # until the head says that this is a stream
        self._ended = False  # nothing more is to be sent
        self._counted = False
        self.cut = False
        """Whether the application ended its body and the client must not see a clean end."""

    async def send(self, message: Message) -> None:
        """Take one message of the application and send what is to be sent for it."""
        corrector = self._corrector
        if corrector is None:
            if message["type"] == "http.response.start":
                message = self._start(message)
        elif message["type"] == "http.response.body" and not self._ended:
            body = message.get("body", b"")
            if not isinstance(body, bytes):
                body = bytes(body)
            if body:
                self._empty = False
            if not message.get("more_body", False):
                await self._finish(message, body, corrector)
                return
            out = corrector.feed(body)
            if out is not body and self._mode is Mode.ON:
                if not out:
                    return
                message = {**message, "body": out}
        await self._send(message)

    async def close(self, why: str) -> None:
        """End a stream that the application left open; ``why`` tells the client."""
        corrector = self._corrector
        if corrector is None or self._ended or self._mode is not Mode.ON:
            return
        self._ended = True
        with contextlib.suppress(OSError):  # the client may have left, which some servers raise
            if corrector.ended:
                await self._send_body(corrector.finish(), more=False)
            else:
                await self._fail(b"", why, corrector)

    def count(self) -> None:
        """Count, once, what the stream was found to be."""
        if self._corrector is None or self._counted:
            return
        self._counted = True
        _count(self._corrector, self._mode)

    def _start(self, message: Message) -> Message:
        """Look at the head: from now on ``_corrector`` says whether this is a stream."""
        headers = list(message.get("headers", ()))
        media_type = b"".join(_values(headers, b"content-type")[:1]).partition(b";")[0]
        if message["status"] not in _SUCCESS or media_type.strip().lower() != _EVENT_STREAM:
            return message
        coding = b",".join(_values(headers, b"content-encoding")).strip().lower()
        if coding not in (b"", b"identity"):
            _inc("lastword_compressed_streams", "passed")
            return message
        self._corrector = Corrector(self._mode)
        if self._mode is Mode.ON and _values(headers, b"content-length"):
            kept = [pair for pair in headers if pair[0].lower() != b"content-length"]
            return {**message, "headers": kept}
        return message

    async def _finish(self, message: Message, body: bytes, corrector: Corrector) -> None:
        """Take the end of the body; the application goes on, so a cut comes after it."""
        self._ended = True
        rest = corrector.feed(body) + corrector.finish()
        if self._mode is not Mode.ON:
            self.count()
            await self._send(message)
        elif corrector.ended or self._empty:
            self.count()
            await self._send({**message, "body": rest})
        else:
            self.cut = await self._fail(rest, _ENDED, corrector)
            if not self.cut:
                log.warning("%s Response: %s", _ENDED, corrector.response_id)

    async def _fail(self, rest: bytes, why: str, corrector: Corrector) -> bool:
        """Send ``response.failed`` if that is wanted and possible; True if a cut is to follow."""
        failure = b"" if self._on_lost is OnLost.ABORT else corrector.fail(why)
        cut = not failure or self._on_lost is not OnLost.FAILED
        self.count()
        if rest or failure:
            await self._send_body(rest + failure, more=cut)
        return cut

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


_Choice = TypeVar("_Choice", Mode, OnLost)


def _settings() -> tuple[Mode, OnLost, re.Pattern[str]]:
    """Read the environment; raises ``ValueError`` with a sentence that says what is allowed."""
    correct = _choice("LASTWORD_CORRECT", Mode.ON)
    on_lost = _choice("LASTWORD_ON_LOST_UPSTREAM", OnLost.FAILED_CUT)
    prefix = os.environ.get("LASTWORD_PATH_PREFIX", "")
    if prefix and (not prefix.startswith("/") or prefix.endswith("/")):
        raise ValueError(
            "LASTWORD_PATH_PREFIX must begin with a slash and not end with one, such as /llm,"
            f" not {prefix!r}."
        )
    return correct, on_lost, re.compile(re.escape(prefix) + "/v1/responses(/[^/]+)?$")


def _choice(name: str, default: _Choice) -> _Choice:
    kind = type(default)
    given = os.environ.get(name, default.value)
    try:
        return kind(given)
    except ValueError:
        *most, last = kind
        raise ValueError(f"{name} must be {', '.join(most)} or {last}, not {given!r}.") from None


def _requested_mode(headers: Headers, default: Mode) -> Mode:
    """Return what ``Lastword-Correct`` asks for; raises ``ValueError`` for an unknown value."""
    given = _values(headers, b"lastword-correct")
    if not given:
        return default
    try:
        return Mode(given[-1].strip().decode("latin-1").lower())
    except ValueError:
        raise ValueError("The header Lastword-Correct must be on, observe or off.") from None


async def _refuse(send: Send, message: str) -> None:
    """Answer 400 in OpenAI's shape."""
    error = {
        "message": message,
        "type": "invalid_request_error",
        "param": "Lastword-Correct",
        "code": 400,
    }
    body = json.dumps({"error": error}, separators=(",", ":")).encode()
    length = b"%d" % len(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _route_path(scope: Scope) -> str:
    """Return the path without the server's or the mount's ``root_path``, as Starlette routes it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _values(headers: Headers, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key.lower() == name]


_COUNTERS = {
    "lastword_corrections": (
        "Terminal events whose name was, or in mode observe would have been, corrected.",
        ("from", "to", "mode"),
    ),
    "lastword_contradictions": (
        "Terminal events that say completed with a payload that does not.",
        (),
    ),
    "lastword_overlong_events": ("Events that were too long and passed uncorrected.", ()),
    "lastword_dropped_events": ("Events that came after the terminal one.", ()),
    "lastword_compressed_streams": ("Event streams that came compressed.", ("coding",)),
}


@cache
def _counters() -> dict[str, Counter]:
    """Register the counters in the default registry, which vLLM's ``/metrics`` shows, once."""
    try:
        import prometheus_client  # noqa: PLC0415 - it need not be there
    except ImportError:
        return {}
    counters = {}
    for name, (text, labels) in _COUNTERS.items():
        try:
            counters[name] = prometheus_client.Counter(name, text, labels)
        except ValueError as error:  # someone else has the name: theirs is shown
            log.warning("The counter %s is not shown: %s", name, error)
            counters[name] = prometheus_client.Counter(name, text, labels, registry=None)
    return counters


def _inc(name: str, *labels: str, by: int = 1) -> None:
    counter = _counters().get(name)
    if counter is not None:
        (counter.labels(*labels) if labels else counter).inc(by)


def _count(corrector: Corrector, mode: Mode) -> None:
    terminal = corrector.terminal
    if terminal is not None and terminal.corrected:
        _inc("lastword_corrections", terminal.says, terminal.name, mode.value)
        if mode is Mode.OBSERVE:
            log.info("%s would be sent as %s: %s", terminal.says, terminal.name, _id(corrector))
    if terminal is not None and corrector.contradiction:
        _inc("lastword_contradictions")
        log.warning(
            "The terminal event says completed and its payload %s: %s",
            terminal.status,
            _id(corrector),
        )
    if corrector.overlong_events:
        _inc("lastword_overlong_events", by=corrector.overlong_events)
    if corrector.dropped_events:
        _inc("lastword_dropped_events", by=corrector.dropped_events)


def _id(corrector: Corrector) -> str:
    return corrector.response_id or "a response without an id"
