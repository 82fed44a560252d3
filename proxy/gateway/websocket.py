"""WebSockets: the handshake is made upstream first, then the two connections are joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake
from websockets.frames import CloseCode
from websockets.headers import parse_subprotocol
from websockets.http11 import Request
from websockets.protocol import OPEN
from websockets.server import ServerProtocol

from proxy.core.outcome import Outcome
from proxy.errors import BadRequestError
from proxy.gateway.record import ANSWERED
from proxy.upstream.headers import response_headers, values
from proxy.upstream.websocket import HANDSHAKE_HEADERS, SWITCHING_PROTOCOLS
from proxy.upstream.websocket_peer import FRAME_LIMITS, QUIET, WebSocketPeer, join

if TYPE_CHECKING:
    from websockets.typing import Subprotocol

    from proxy.gateway.downstream import Downstream
    from proxy.gateway.drain import Drain
    from proxy.gateway.record import Observer
    from proxy.gateway.routes import ResponsesRoutes
    from proxy.gateway.stream_slots import StreamSlots
    from proxy.gateway.upgrade import Upgrade
    from proxy.settings import Settings
    from proxy.upstream.client import UpstreamClient
    from proxy.upstream.headers import Forwarding, Pairs
    from proxy.upstream.websocket import UpstreamHandshake

__all__ = ["WebSocketRelay"]

log = structlog.stdlib.get_logger("lastword")


class WebSocketRelay:
    """Passes WebSockets on any path, frame by frame, once upstream has agreed to them."""

    def __init__(
        self,
        settings: Settings,
        client: UpstreamClient,
        forwarding: Forwarding,
        routes: ResponsesRoutes,
        *,
        observer: Observer,
        drain: Drain,
        slots: StreamSlots,
    ) -> None:
        self._stall_s = settings.write_stall_s
        self._client = client
        self._forwarding = forwarding
        self._routes = routes
        self._observer = observer
        self._drain = drain
        self._slots = slots

    async def serve(self, down: Downstream, upgrade: Upgrade) -> None:
        """Serve one handshake and what follows, until both connections are gone.

        Upstream's refusal is the answer, except where responses are created: that is 426, by which
        Codex goes on over HTTP at once. It takes one of the slots for streams. Raises
        ``RequestError`` for everything that fails before the client was answered.
        """
        with self._slots.one():
            await self._serve(down, upgrade)

    async def _serve(self, down: Downstream, upgrade: Upgrade) -> None:
        accept, subprotocols = _check_handshake(down.headers)
        headers = self._forwarding.request_headers(
            down.headers,
            peer=down.peer,
            scheme="http",
            http_version=down.http_version,
            request_id=down.request_id,
            identity=False,
        )
        handshake = await self._client.open_websocket(
            down.target,
            [pair for pair in headers if pair[0] not in HANDSHAKE_HEADERS],
            subprotocols,
        )
        try:
            if handshake.status == SWITCHING_PROTOCOLS:
                await self._relay(down, upgrade, handshake, accept)
            elif self._routes.is_create("POST", down.path):
                raise BadRequestError(
                    426,
                    "Responses are not served over a WebSocket here; send the request by POST.",
                    headers=((b"upgrade", b"HTTP/1.1"), (b"connection", b"upgrade, close")),
                )
            else:
                head = _headers_down(handshake.headers, down.request_id)
                await down.answer(handshake.status, head, handshake.body)
        finally:
            handshake.close()

    async def _relay(
        self, down: Downstream, upgrade: Upgrade, handshake: UpstreamHandshake, accept: bytes
    ) -> None:
        agreed = [
            (b"upgrade", b"websocket"),
            (b"connection", b"Upgrade"),
            (b"sec-websocket-accept", accept),
        ]
        transport, early = upgrade.switch(
            [*agreed, *_headers_down(handshake.headers, down.request_id)]
        )
        down.record.status = SWITCHING_PROTOCOLS
        client = WebSocketPeer(
            transport,
            ServerProtocol(state=OPEN, max_size=FRAME_LIMITS, logger=QUIET),
            who="The client",
            loss_code=CloseCode.GOING_AWAY,
            stall_s=self._stall_s,
        )
        upstream = handshake.peer(stall_s=self._stall_s)
        both = _Joined(client, upstream)
        with self._drain.stream(both):
            await join(client, upstream, early)
        record = down.record
        record.outcome = both.outcome
        if upstream.failure is not None:
            self._observer.upstream_failed("broken")
            log.warning(
                "a WebSocket was lost",
                error=upstream.failure,
                route=record.route,
                request_id=record.request_id,
            )


class _Joined:
    """Both sides of a WebSocket, for the drain."""

    def __init__(self, client: WebSocketPeer, upstream: WebSocketPeer) -> None:
        self._client = client
        self._upstream = upstream
        self._stopped = False

    @property
    def outcome(self) -> str:
        """How it ended: by a close frame, or by whose fault without one."""
        if self._upstream.failure is not None:
            return Outcome.LOST
        if self._client.failure is not None:
            return Outcome.CLIENT_GONE
        return Outcome.STOPPED if self._stopped else ANSWERED

    def stop(self, reason: str) -> None:
        """Tell both sides that this end is going away."""
        for peer in (self._client, self._upstream):
            self._stopped = peer.close(CloseCode.GOING_AWAY, reason) or self._stopped


def _check_handshake(headers: Pairs) -> tuple[bytes, list[Subprotocol]]:
    """Return what proves that we can speak WebSocket, and the subprotocols that are offered.

    Raises ``BadRequestError`` (400) for a handshake that RFC 6455, section 4.2.1, refuses.
    """
    asked = Headers()
    for name, value in headers:
        if name in (b"connection", b"upgrade") or name.startswith(b"sec-websocket-"):
            asked.set_insecure(name.decode(), value.decode("latin-1"))
    response = ServerProtocol(logger=QUIET).accept(Request("/", asked))
    try:
        offers = values(headers, b"sec-websocket-protocol")
        offered = [name for offer in offers for name in parse_subprotocol(offer.decode("latin-1"))]
    except InvalidHandshake:
        offered = None
    if response.status_code != SWITCHING_PROTOCOLS or offered is None:
        # Without the library's error: it quotes headers, and subprotocols are used for keys.
        raise BadRequestError(
            400,
            "The WebSocket handshake is not well-formed: it needs one Sec-WebSocket-Key of 16 bytes"
            " in base64, Sec-WebSocket-Version 13, and Sec-WebSocket-Protocol, if any, as a list.",
            headers=((b"sec-websocket-version", b"13"),),
        )
    return response.headers["Sec-WebSocket-Accept"].encode(), offered


def _headers_down(headers: Pairs, request_id: bytes) -> Pairs:
    """Return the headers of upstream's answer that are the client's business too."""
    kept = [(name, value) for name, value in headers if name.lower() not in HANDSHAKE_HEADERS]
    return response_headers(
        kept, request_id=request_id, event_stream=False, rewritten=True, decoded=False
    )
