"""A connection that may become a WebSocket: what comes behind the handshake, and the switch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from proxy.gateway.protocol import LastwordProtocol
    from proxy.upstream.headers import Pairs

__all__ = ["UPGRADE", "Upgrade"]

UPGRADE = "lastword.upgrade"
_EARLY_BYTES = 64 * 1024


class Upgrade:
    """A client's request for a WebSocket; it is refused by any other answer than ``switch``.

    The connection ends with such an answer: whether the client has begun to send frames, nobody
    can tell. It is offered as the ASGI extension ``lastword.upgrade``.
    """

    def __init__(self, protocol: LastwordProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._early = bytearray()
        cycle.keep_alive = False

    def take(self, data: bytes) -> None:
        """Keep what the client sends before it was answered, as far as it is little."""
        self._early += data
        if len(self._early) > _EARLY_BYTES:
            self._protocol.flow.pause_reading()

    def switch(self, headers: Pairs) -> tuple[asyncio.Transport, bytes]:
        """Agree (101) and give the connection away, with what the client had sent already.

        The transport's next protocol must be set at once.
        """
        head = b"".join(b"%b: %b\r\n" % pair for pair in headers)
        transport = self._cycle.transport
        transport.write(b"HTTP/1.1 101 Switching Protocols\r\n%b\r\n" % head)
        self._cycle.response_started = self._cycle.response_complete = True
        self._protocol.let_go()
        return transport, bytes(self._early)
