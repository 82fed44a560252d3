"""uvicorn's HTTP protocol with what a relay needs: writers, cuts, stalls."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
from typing import TYPE_CHECKING, Any

import structlog

from proxy.gateway.body_writer import EXTENSION, BodyWriter
from proxy.gateway.request_reader import RequestReader
from proxy.gateway.upgrade import UPGRADE, Upgrade

if TYPE_CHECKING:
    import asyncio

    from proxy.core.held_bytes import HeldBytes
    from proxy.gateway.open_files import OpenFiles

__all__ = ["LastwordProtocol"]

_RESET_AFTER_S = 0.1

log = structlog.stdlib.get_logger("lastword")


class LastwordProtocol(RequestReader):
    """A ``RequestReader`` with a ``BodyWriter`` for every request.

    A client that takes nothing for ``stall_s`` seconds is cut off.  What it has not taken is put
    to the account ``held``.  Where ``files`` are used up, a connection is closed at once.
    """

    def __init__(
        self, *args: Any, held: HeldBytes, files: OpenFiles | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._files = files
        self._unread = held.share()
        self._stall_timer: asyncio.TimerHandle | None = None
        self._stalled_bytes = 0
        self._give_up_at = 0.0
        self.writers: set[BodyWriter] = set()

    def on_headers_complete(self) -> None:
        """Give the request its writer; HTTP/1.0 clients get bodies that end with the connection."""
        previous = self.cycle
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is previous:  # an upgrade, or a head that is read again: no request was begun
            return
        if self.scope["http_version"] == "1.0":
            cycle.chunked_encoding = False
        writer = BodyWriter(self, cycle, self.url)
        self.writers.add(writer)
        self.scope["extensions"] = {EXTENSION: writer}  # type: ignore[dict-item]
        if self.parser.should_upgrade():
            self.upgrade = Upgrade(self, cycle)
            self.scope["extensions"][UPGRADE] = self.upgrade  # type: ignore[assignment]

    def let_go(self) -> None:
        """Leave the connection to another protocol."""
        self.connections.discard(self)
        self.writers.clear()
        self.unset_client_timer()
        self._unset_stall_timer()
        self._unread.close()

    def on_response_complete(self) -> None:
        """Forget the writers of responses that went out by ASGI's ``send``."""
        self.writers = {writer for writer in self.writers if not writer.ended}
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the requests that are still running that their client has left."""
        super().connection_lost(exc)
        self._unset_stall_timer()
        self._unread.close()
        self._tell_gone()

    def abandon(self) -> None:
        """Cut what was begun of the running answer, and stop its request."""
        super().abandon()
        for writer in list(self.writers):
            if writer.started:
                writer.cut()
        self._tell_gone()

    def _tell_gone(self) -> None:
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
        if connection is not None and self._files is not None and self._files.refuses(connection):
            transport.abort()
            return
        if connection is not None and connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def reset_soon(self) -> None:
        """Break the connection (RST) once the client's machine has taken what was written."""
        self._give_up_at = self.loop.time() + self.stall_s
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
        """Look again in ``stall_s`` whether the client has taken anything."""
        self._stalled_bytes = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.stall_s, self._check_stall)

    def _check_stall(self) -> None:
        if self.transport.get_write_buffer_size() < self._stalled_bytes:
            self._watch_stall()
        else:
            log.info("a client was cut off: it took nothing (write_stall_s)", after_s=self.stall_s)
            self.transport.abort()

    def _unset_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
