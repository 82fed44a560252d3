"""Requests taken off a connection, each size and each wait of them limited.

uvicorn's protocol on httptools has no limits on a head, waits for ever for the rest of a request,
and answers a broken one in the middle of another's response.  This is its reading side, cured.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import httptools
import structlog

from proxy.errors import BadRequestError, RequestError, own_fault
from proxy.gateway.ending import EndingProtocol, refusal
from proxy.gateway.head import HeadLimits, check_head
from proxy.upstream.headers import values

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from proxy.gateway.upgrade import Upgrade

__all__ = ["RequestReader"]

# Requests that a client may send ahead of their answers; each waits in memory.
_MAX_AHEAD = 64
# A chunk of one byte takes six on the wire, seven with a long size; more is padding.
_FRAMING_PER_BODY_BYTE = 16
_UPGRADE_TOKENS = frozenset({b"upgrade", b"http2-settings"})

log = structlog.stdlib.get_logger("lastword")


class RequestReader(EndingProtocol):
    """uvicorn's protocol, with a judge before every request and a timer on every wait.

    A refused request is answered in OpenAI's shape, behind the answers that were due before it,
    and ends its connection.  A body that makes no progress for ``stall_s`` is refused too.
    ``on_refused`` is told the status.
    """

    def __init__(
        self, *args: Any, limits: HeadLimits, on_refused: Callable[[int], None], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._on_refused = on_refused
        self.url = b""
        self.headers = []
        self._in_head = False
        self._in_body = False
        self._last_words = b""
        self._unanswered = 0
        self._reads = 0
        self._same_part = False  # the last read neither ended a head nor a body
        self._read_bytes = 0
        self._body_bytes = 0  # of the last read
        self._head_bytes = 0
        self._framing_bytes = 0
        self._trailers = 0
        self.upgrade: Upgrade | None = None  # what takes the bytes behind such a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close a connection that sends nothing as one that sends no more."""
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        if self.upgrade is not None:
            self.upgrade.take(data)
            return
        self._unset_keepalive_if_required()
        if not self.deaf:
            self._reads += 1
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        self._same_part = True
        self._read_bytes = len(data)
        self._body_bytes = 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            rest = data[stop.args[0] :]
        except httptools.HttpParserError as error:
            self.refuse(_reason(error))
            return
        else:
            if self._same_part or self._in_head or self._in_body:
                self._on_part()
            return
        # Not within the handler: what goes wrong in the rest would look like its consequence.
        if self.upgrade is not None:
            self.upgrade.take(rest)
        else:
            self._parse(self._without_upgrade(rest))

    def _on_part(self) -> None:
        """Look at a request that has come in part: is it too large, and who waits for the rest."""
        if self._same_part:
            try:
                self._check_part()
            except BadRequestError as error:
                self.refuse(error)
                return
        self._watch_client()

    def _check_part(self) -> None:
        if not self._in_body:  # a head, or the empty lines that may stand before one
            self._head_bytes += self._read_bytes
            self._limits.check(self.url, self.headers, self._head_bytes)
            return
        framing = self._read_bytes - self._body_bytes * (1 + _FRAMING_PER_BODY_BYTE)
        self._framing_bytes = max(0, self._framing_bytes + framing)
        self._limits.check_framing(self._framing_bytes, self._trailers)

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Return the request as one that asks for no upgrade (RFC 9110, section 7.8).

        llhttp stops at such a head and would lose the body; the JDK's client sends
        ``Upgrade: h2c`` with every first request.
        """
        head = [
            b"%b %b HTTP/%b\r\n"
            % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        ]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.lower().split(b",")]
                value = b", ".join(t for t in tokens if t not in _UPGRADE_TOKENS)  # noqa: PLW2901
            if name not in _UPGRADE_TOKENS and (name != b"connection" or value):
                head.append(b"%b: %b\r\n" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        return b"".join([*head, b"\r\n", rest])

    # Called by httptools, by these names.

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, and drop trailers: uvicorn would append them to the head's."""
        if self._in_head:
            self.headers.append((name.lower(), value))
            return
        self._trailers += 1
        self._limits.check_framing(self._framing_bytes, self._trailers)

    def on_headers_complete(self) -> None:
        """Judge the head, and only then begin the request."""
        self._in_head = False
        self._same_part = False
        self.unset_client_timer()
        version = self.parser.get_http_version()
        received = self._head_bytes + self._read_bytes
        self._limits.check_whole(self.url, self.headers, received)
        self._head_bytes = 0
        asks = check_head(version, self.parser.get_method(), self.url, self.headers)
        if len(self.pipeline) >= _MAX_AHEAD:
            raise BadRequestError(
                429, f"More than {_MAX_AHEAD} requests were sent ahead of their answers."
            )
        if self._ignores_upgrade():
            return  # the head is read again without its upgrade
        if self.parser.should_upgrade() and self._unanswered:
            raise BadRequestError(400, "A WebSocket was asked for ahead of the answers before it.")
        self.expect_100_continue = asks
        self._framing_bytes = self._trailers = 0
        self._in_body = True
        previous = self.cycle
        super().on_headers_complete()
        if self.cycle is not previous:
            self._unanswered += 1

    def on_body(self, body: bytes) -> None:
        """Count a piece of the body and hand it on."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Take a request's end; llhttp also calls it where it stops for an upgrade."""
        if self._ignores_upgrade():
            return
        self._in_body = False
        self._same_part = False
        self.unset_client_timer()
        super().on_message_complete()
        if self._trailers and not self.parser.should_keep_alive():
            self.cycle.keep_alive = False  # llhttp believes a trailer, and hears no more
            if not self._unanswered:
                self.close()
        elif not (self._unanswered or self.parser.should_upgrade()):
            self._await_request()  # the answer was there before the end of the request

    def _ignores_upgrade(self) -> bool:
        return bool(self.parser.should_upgrade()) and not self._asks_for_websocket()

    def _asks_for_websocket(self) -> bool:
        """Whether a head that says ``Connection: upgrade`` may be a WebSocket's (RFC 6455, 4.1)."""
        bodies = [
            *values(self.headers, b"content-length"),
            *values(self.headers, b"transfer-encoding"),
        ]
        return (
            self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and all(value == b"0" for value in bodies)
            and any(value.lower() == b"websocket" for value in values(self.headers, b"upgrade"))
        )

    # Waiting for the client.

    def _await_request(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _watch_client(self) -> None:
        """Give the rest of a request its time; a head's counts from its first byte.

        A head that comes while others are answered has until then and its time.
        """
        if self.client_timer is not None:
            return
        if self._in_body:
            self.client_timer = self.loop.call_later(self.stall_s, self._check_body, self._reads)
        elif not self._unanswered:
            self.client_timer = self.loop.call_later(self._limits.timeout_s, self._on_late_head)

    def _check_body(self, reads: int) -> None:
        self.client_timer = None
        if self._reads != reads or self.flow.read_paused:
            self._watch_client()
        else:
            self.refuse(
                BadRequestError(408, f"No more of the request's body came for {self.stall_s:g} s.")
            )

    def _on_late_head(self) -> None:
        self.client_timer = None
        if self._in_head:
            limit_s = self._limits.timeout_s
            self.refuse(BadRequestError(408, f"The request's head took more than {limit_s:g} s."))
        else:
            self.close()

    # Ending.

    def on_response_complete(self) -> None:
        """Go on to the next request, or to the refusal that had to wait."""
        self._unanswered -= 1
        if self.lingering:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self._last_words and not self._unanswered:
            self.say_last(self._last_words)
        elif self._in_head and not self.deaf:
            self._watch_client()

    def refuse(self, error: RequestError) -> None:
        """Read nothing more, answer ``error`` once it is its turn, and end the connection.

        A request that breaks within its body is given up; if its answer has begun, that is cut.
        """
        log.info("a request was refused", status=error.status, error=error.message)
        self._on_refused(error.status)
        request_id = dict(self.headers).get(b"x-request-id") or secrets.token_hex(16).encode()
        head_only = bool(self.url) and self.parser.get_method() == b"HEAD"
        answer = refusal(error, request_id, head_only=head_only)
        self.deaf = True
        self.unset_client_timer()
        if self._in_body:
            self._in_body = False
            if self.pipeline and self.pipeline[0][0] is self.cycle:
                self.pipeline.popleft()
                self._unanswered -= 1
            elif self.cycle.response_complete:
                self.linger()
                return
            else:
                begun = self.cycle.response_started
                self.abandon()
                if begun:
                    return
        if self._unanswered:
            self._last_words = answer
        else:
            self.say_last(answer)

    def abandon(self) -> None:
        """Tell the running request that its client is gone."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        self._unanswered -= 1

    def close_after_answer(self) -> None:
        """Close the connection behind an answer, even if the request is not read to its end."""
        if self._in_body:
            self.linger()
        else:
            self.close()


def _reason(error: httptools.HttpParserError) -> RequestError:
    """Return what a callback raised, or say what llhttp found."""
    cause = error.__context__
    if isinstance(cause, RequestError):
        return cause
    if isinstance(error, httptools.HttpParserCallbackError) and not isinstance(
        cause, httptools.HttpParserError
    ):
        log.error("a request failed inside the proxy", exc_info=cause)
        return own_fault()
    return BadRequestError(400, f"This is no valid HTTP/1.1: {str(error).rstrip('.')}.")
