"""uvicorn's HTTP protocol with what a relay needs: writers, upgrades ignored, cuts, stalls."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
import uuid
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from proxy.errors import error_body
from proxy.gateway.body_writer import EXTENSION, BodyWriter
from proxy.gateway.upgrade import UPGRADE, Upgrade
from proxy.upstream.headers import values

if TYPE_CHECKING:
    import asyncio

    from proxy.core.held_bytes import HeldBytes

__all__ = ["LastwordProtocol"]

_RESET_AFTER_S = 0.1
_UPGRADE_TOKENS = frozenset({b"upgrade", b"http2-settings"})


class LastwordProtocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools, with a ``BodyWriter`` for every request.

    A client that takes nothing for ``write_stall_s`` seconds is cut off.  What it has not taken is
    put to the account ``held``.
    """

    def __init__(
        self, *args: Any, held: HeldBytes, write_stall_s: float = 300.0, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._write_stall_s = write_stall_s
        self._unread = held.share()
        self._stall_timer: asyncio.TimerHandle | None = None
        self._stalled_bytes = 0
        self._give_up_at = 0.0
        self.writers: set[BodyWriter] = set()
        self._in_head = False
        self._upgrade: Upgrade | None = None

    def data_received(self, data: bytes) -> None:
        """Take bytes; an upgrade that is not ours to make is ignored and the body kept."""
        if self._upgrade is not None:
            self._upgrade.take(data)
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_behind_upgrade(data[upgrade.args[0] :])

    def _go_on_behind_upgrade(self, rest: bytes) -> None:
        if self._upgrade is not None:
            self._upgrade.take(rest)
        else:
            self._go_on_without_upgrade(rest)

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Read the request again as one that asks for no upgrade (RFC 9110, section 7.8).

        llhttp stops at such a head and would lose the body; the JDK's client sends
        ``Upgrade: h2c`` with every first request.
        """
        head = [b"%b %b HTTP/1.1\r\n" % (self.parser.get_method(), self.url)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.lower().split(b",")]
                value = b", ".join(t for t in tokens if t not in _UPGRADE_TOKENS)  # noqa: PLW2901
            if name not in _UPGRADE_TOKENS and (name != b"connection" or value):
                head.append(b"%b: %b\r\n" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join([*head, b"\r\n", rest]))

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, and drop trailers: uvicorn would append them to the head's."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Give the request its writer; HTTP/1.0 clients get bodies that end with the connection."""
        self._in_head = False
        if self._ignores_upgrade():
            return  # the head is read again without its upgrade
        previous = self.cycle
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is previous:  # an upgrade: no request was begun
            return
        if self.parser.get_http_version() == "1.0":
            cycle.chunked_encoding = False
        writer = BodyWriter(self, cycle, self.url)
        self.writers.add(writer)
        self.scope["extensions"] = {EXTENSION: writer}  # type: ignore[dict-item]
        if self.parser.should_upgrade():
            self._upgrade = Upgrade(self, cycle)
            self.scope["extensions"][UPGRADE] = self._upgrade  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        """Take a request's end; llhttp also calls it where it stops for an upgrade."""
        if not self._ignores_upgrade():
            super().on_message_complete()

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

    def let_go(self) -> None:
        """Leave the connection to another protocol."""
        self.connections.discard(self)
        self.writers.clear()
        self._unset_stall_timer()

    def on_response_complete(self) -> None:
        """Forget the writers of responses that went out by ASGI's ``send``."""
        self.writers = {writer for writer in self.writers if not writer.ended}
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the requests that are still running that their client has left."""
        super().connection_lost(exc)
        self._unset_stall_timer()
        self._unread.close()
        for writer in list(self.writers):
            writer.lose()
        self.writers.clear()

    def pause_writing(self) -> None:
        """Hold upstream back while the client does not read."""
        super().pause_writing()
        self._watch_stall()
        self._unread.add(self._stalled_bytes)
        for writer in self.writers:
            if writer.on_pause is not None:
                writer.on_pause()

    def resume_writing(self) -> None:
        """Let upstream go on."""
        super().resume_writing()
        self._unset_stall_timer()
        self._unread.close()
        for writer in self.writers:
            if writer.on_resume is not None:
                writer.on_resume()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send events at once: asyncio leaves Nagle's algorithm on for sockets made by hand."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def reset_soon(self) -> None:
        """Break the connection (RST) once the client's machine has taken what was written."""
        self._give_up_at = self.loop.time() + self._write_stall_s
        self.loop.call_later(_RESET_AFTER_S, self._reset)

    def _reset(self) -> None:
        connection = self.transport.get_extra_info("socket")
        if connection is not None and not self.transport.is_closing():
            if self._untaken(connection) and self.loop.time() < self._give_up_at:
                self.loop.call_later(_RESET_AFTER_S, self._reset)
                return
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _untaken(self, connection: socket.socket) -> int:
        """How many bytes an RST would destroy: ours, and the kernel's where it can be asked."""
        unsent = self.transport.get_write_buffer_size()
        if sys.platform == "linux":
            queued = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
            unsent += int.from_bytes(queued, sys.byteorder)
        return unsent

    def _watch_stall(self) -> None:
        """Look again in ``write_stall_s`` whether the client has taken anything."""
        self._stalled_bytes = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self._write_stall_s, self._check_stall)

    def _check_stall(self) -> None:
        if self.transport.get_write_buffer_size() < self._stalled_bytes:
            self._watch_stall()
        else:
            self.transport.abort()

    def _unset_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in OpenAI's shape."""
        body = error_body(400, msg)
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\n"
            b"connection: close\r\n\r\n"
        )
        request_id = uuid.uuid4().hex.encode()
        self.transport.write(STATUS_LINE[400] + head % (len(body), request_id) + body)
        self.transport.close()
