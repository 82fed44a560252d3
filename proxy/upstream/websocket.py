"""The opening handshake of a WebSocket with upstream, up to its answer (RFC 6455, section 4)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

import httpx
from websockets.client import ClientProtocol
from websockets.frames import CloseCode
from websockets.http11 import Response
from websockets.uri import parse_uri

from proxy.upstream.websocket_peer import FRAME_LIMITS, QUIET, WebSocketPeer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from websockets.typing import Subprotocol

    from proxy.upstream.headers import Pairs

__all__ = ["HANDSHAKE_HEADERS", "SWITCHING_PROTOCOLS", "UpstreamHandshake"]

SWITCHING_PROTOCOLS: Final = 101
# Each connection has its own; the subprotocol alone is chosen end to end.
HANDSHAKE_HEADERS: Final = frozenset(
    {
        b"sec-websocket-accept",
        b"sec-websocket-extensions",
        b"sec-websocket-key",
        b"sec-websocket-version",
    }
)
_FINAL: Final = range(200, 600)
_ANY_URI: Final = parse_uri("ws://upstream/")  # the library wants one; the request line is ours


class UpstreamHandshake(asyncio.Protocol):
    """Upstream's socket until it has answered, then its answer.

    ``status`` is 101 if upstream has agreed, and then ``peer`` takes the connection; otherwise
    ``status``, ``headers`` and ``body`` (up to 1 MiB) are its refusal. No extension is asked for:
    a frame passes as it is, and compressing it twice costs more than it saves.
    """

    status: int
    headers: Pairs
    body: bytes

    def __init__(self, subprotocols: Sequence[Subprotocol]) -> None:
        self._protocol = ClientProtocol(
            _ANY_URI, subprotocols=subprotocols or None, max_size=FRAME_LIMITS, logger=QUIET
        )
        self._answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    @property
    def request_headers(self) -> Pairs:
        """What the request must say beside the headers that cross the proxy."""
        return [
            (b"connection", b"Upgrade"),
            (b"upgrade", b"websocket"),
            (b"sec-websocket-key", self._protocol.key.encode()),
            (b"sec-websocket-version", b"13"),
        ]

    async def exchange(self, head: bytes, limit_s: float | None) -> None:
        """Send the request's head on the connection that was made, and wait for the answer.

        Raises ``httpx.ReadTimeout`` after ``limit_s`` seconds and ``httpx.RemoteProtocolError``
        for no answer, or one that breaks the handshake.
        """
        assert self._transport is not None  # noqa: S101 - it is connected
        self._transport.write(head)
        try:
            async with asyncio.timeout(limit_s):
                await self._answered
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"upstream sent no answer within {limit_s:g} s") from error
        answer = self._protocol.events.pop(0) if self._protocol.events else None
        refused = isinstance(answer, Response) and answer.status_code in _FINAL
        if not isinstance(answer, Response) or (self._protocol.handshake_exc and not refused):
            # Without the library's error: it quotes what upstream said.
            raise httpx.RemoteProtocolError("upstream answered no proper WebSocket handshake")
        self.status = answer.status_code
        self.headers = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in answer.headers.raw_items()
        ]
        self.body = bytes(answer.body)

    def peer(self, *, stall_s: float) -> WebSocketPeer:
        """Return upstream's side of the relay."""
        return WebSocketPeer(
            cast("asyncio.Transport", self._transport),
            self._protocol,
            who="The upstream server",
            loss_code=CloseCode.INTERNAL_ERROR,
            stall_s=stall_s,
        )

    def close(self) -> None:
        """Cut the connection, if one was made."""
        if self._transport is not None:
            self._transport.abort()

    # The callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Take a piece of the answer; what comes behind it waits in the socket."""
        self._protocol.receive_data(data)
        if self._protocol.events or self._protocol.handshake_exc is not None:
            self._settle()

    def eof_received(self) -> None:
        """Take the end, which may be a body's only framing."""
        self._protocol.receive_eof()
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - gone is gone
        """End the wait."""
        self._protocol.receive_eof()
        self._settle()

    def _settle(self) -> None:
        if self._answered.done():
            return
        self._answered.set_result(None)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
