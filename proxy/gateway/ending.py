"""Connections ended so that the client gets the last answer, and no one waits for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio

    from proxy.errors import RequestError

__all__ = ["EndingProtocol", "refusal"]

# A client that is refused while it sends must not lose the answer to a reset: what it still sends
# is read, and dropped, for so long.
_LINGER_S = 2.0


class EndingProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with endings of its own.

    ``deaf`` means that nothing more is parsed, ``lingering`` that our side is ended;
    ``client_timer`` is the one wait for the client besides uvicorn's own for a next request.
    A closed connection whose client takes nothing for ``stall_s`` is broken off.
    """

    def __init__(self, *args: Any, stall_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stall_s = stall_s
        self.deaf = False
        self.lingering = False
        self.client_timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave no timer behind."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.unset_client_timer()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection on which nothing comes."""
        self.close()

    def unset_client_timer(self) -> None:
        """Wait for nothing."""
        if self.client_timer is not None:
            self.client_timer.cancel()
            self.client_timer = None

    def say_last(self, answer: bytes) -> None:
        """Write an answer behind which nothing comes."""
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.linger()

    def linger(self) -> None:
        """End our side; read and drop what comes for a moment, so that no reset eats the answer."""
        self.deaf = self.lingering = True
        self._unset_keepalive_if_required()
        self.unset_client_timer()
        if self.transport.is_closing():
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        self.client_timer = self.loop.call_later(_LINGER_S, self.close)

    def close(self) -> None:
        """Close the connection when the client has taken what was written, or takes too long."""
        self.unset_client_timer()
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.client_timer = self.loop.call_later(self.stall_s, self.transport.abort)


def refusal(error: RequestError, request_id: bytes, *, head_only: bool) -> bytes:
    """Return an error as a whole answer that ends its connection."""
    body = error.body()
    head = STATUS_LINE[error.status] + (
        b"content-type: application/json\r\ncontent-length: %d\r\n"
        b"x-request-id: %b\r\nconnection: close\r\n\r\n" % (len(body), request_id)
    )
    return head if head_only else head + body
