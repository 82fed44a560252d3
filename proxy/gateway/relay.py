"""The hot path: one request up, its answer down, a Responses stream through the corrector.

A plain ASGI application without middleware in front of it.  What it does not look at passes
as bytes, both ways, without being held.
"""

from __future__ import annotations

import asyncio
import ipaddress
from typing import TYPE_CHECKING

import httpx
import structlog

from proxy.core.content_coding import DECODABLE
from proxy.core.corrector import Mode
from proxy.core.http_chunk import data_size
from proxy.core.outcome import Outcome
from proxy.errors import FullError, RequestError, UpstreamError, own_fault
from proxy.gateway.background_answers import away
from proxy.gateway.downstream import ClientGoneError, Downstream
from proxy.gateway.record import ANSWERED, REFUSED, brief
from proxy.gateway.request_coding import decoder_for
from proxy.gateway.routes import ResponsesRoutes, requested_mode
from proxy.gateway.stream_relay import StreamRelay
from proxy.gateway.websocket import WebSocketRelay
from proxy.store import StoreError
from proxy.upstream.client import lost_message
from proxy.upstream.headers import Forwarding, response_headers, values, with_identity_body
from proxy.upstream.silence import SilenceLimit

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from proxy.core.held_bytes import HeldBytes
    from proxy.gateway.background import BackgroundRoutes
    from proxy.gateway.drain import Drain
    from proxy.gateway.record import Observer
    from proxy.gateway.stream_slots import StreamSlots
    from proxy.settings import Settings
    from proxy.upstream.client import UpstreamClient, UpstreamResponse
    from proxy.upstream.headers import Pairs

__all__ = ["Relay"]

_EVENT_STREAM = b"text/event-stream"
_IDENTITY = frozenset({b"", b"identity"})
_SUCCESS = range(200, 300)
_STATUSES = range(200, 600)

log = structlog.stdlib.get_logger("lastword")


class Relay:
    """The traffic port's application."""

    def __init__(
        self,
        settings: Settings,
        *,
        client: UpstreamClient,
        observer: Observer,
        background: BackgroundRoutes | None,
        drain: Drain,
        held: HeldBytes,
        slots: StreamSlots,
    ) -> None:
        self._settings = settings
        self._client = client
        self._observer = observer
        self._background = background
        self._drain = drain
        self._held = held
        self._slots = slots
        self._max_create_bytes = min(settings.max_request_body_bytes, settings.max_buffered_bytes)
        self._routes = ResponsesRoutes(settings.path_prefix)
        self._forwarding = Forwarding(
            trusted_networks=tuple(
                ipaddress.ip_network(part.strip(), strict=False)
                for part in settings.trusted_proxies.split(",")
                if part.strip()
            ),
            origin_host=client.origin_host if settings.upstream_host == "upstream" else None,
            default_host=client.origin_host,
        )
        self._websockets = WebSocketRelay(
            settings,
            client,
            self._forwarding,
            self._routes,
            observer=observer,
            drain=drain,
            slots=slots,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; every error becomes an answer or a cut, and a log line."""
        down = Downstream(scope, receive, send)
        record = down.record
        record.route = self._routes.template(down.path)
        try:
            with self._drain.request():
                here = await down.while_here(lambda: self._serve(down))
            record.outcome = record.outcome or (ANSWERED if here else Outcome.CLIENT_GONE)
        except ClientGoneError:
            record.outcome = Outcome.CLIENT_GONE
        except RequestError as error:
            record.outcome = REFUSED
            if isinstance(error, UpstreamError):
                self._observer.upstream_failed(error.kind)
                log.warning("upstream failed", error=error.message, **_names(down))
            elif isinstance(error, FullError):
                self._observer.limit_reached(error.limit)
            await down.refuse(error)
        except asyncio.CancelledError:
            # The server stops and its grace is over. The task ends here either way, and uvicorn
            # would log the cancellation as a fault.
            record.outcome = record.outcome or Outcome.STOPPED
            down.writer.cut()
        except Exception:
            record.outcome = REFUSED
            log.exception("a request failed inside the proxy", **_names(down))
            await down.refuse(own_fault())
        finally:
            now = asyncio.get_running_loop().time()
            self._observer.request_ended(record, now - record.began_at)

    async def _serve(self, down: Downstream) -> None:
        if self._drain.refusing:
            raise RequestError(
                503,
                "This proxy is shutting down and takes no new requests; try again.",
                headers=((b"retry-after", b"1"), (b"connection", b"close")),
            )
        if down.upgrade is not None:
            await self._websockets.serve(down, down.upgrade)
            return
        routes = self._routes
        creates = routes.is_create(down.method, down.path)
        response_id = routes.retrieve_id(down.method, down.path)
        down.record.response_id = brief(response_id)
        looked_at = creates or response_id is not None
        mode = requested_mode(down.headers, self._settings.correct) if looked_at else Mode.OFF
        if not looked_at:
            await self._exchange(down, mode)
            return
        with self._slots.one():
            await self._exchange(down, mode, creates=creates, looked_at=True)

    async def _exchange(
        self, down: Downstream, mode: Mode, *, creates: bool = False, looked_at: bool = False
    ) -> None:
        """Take the request, ask upstream or a copy, and answer."""
        headers = self._forwarding.request_headers(
            down.headers,
            peer=down.peer,
            scheme="http",
            http_version=down.http_version,
            request_id=down.request_id,
            identity=looked_at and mode is not Mode.OFF,
        )
        # Only the body of a create is held as a whole: one that can never fit is 413, not 503.
        limit = self._max_create_bytes if creates else self._settings.max_request_body_bytes
        down.check_length(limit)
        with self._held.share() as share:
            if creates:
                await down.read_body(limit, share, decoder_for(down.headers))
                if values(down.headers, b"content-encoding"):
                    headers = with_identity_body(headers, len(down.body))
            try:
                if await self._kept(down, headers, creates=creates):
                    return
            except StoreError as error:
                log.warning(
                    "a request failed since the store did",
                    error=str(error),
                    request_id=down.request_id,
                )
                raise away(error) from error
            response = await self._client.open(
                down.method,
                down.target,
                headers,
                down.body if creates else await down.upload(limit),
            )
        try:
            await self._answer(down, response, mode)
        finally:
            await response.stream.aclose()
            down.record.bytes = response.stream.received

    async def _kept(self, down: Downstream, headers: Pairs, *, creates: bool) -> bool:
        """Answer what concerns a response whose copy is kept here; False for all else."""
        background, routes = self._background, self._routes
        if background is None:
            return False
        if creates:
            return await background.create(down, headers)
        if (response_id := routes.retrieve_id(down.method, down.path)) is not None:
            return await background.retrieve(down, response_id, headers)
        if (response_id := routes.cancel_id(down.method, down.path)) is not None:
            return await background.cancel(down, response_id, headers)
        if (response_id := routes.delete_id(down.method, down.path)) is not None:
            return await background.delete(down, response_id, headers)
        return False

    async def _answer(self, down: Downstream, response: UpstreamResponse, mode: Mode) -> None:
        """Send the head at once, then the body as it comes."""
        raw = response.headers.raw
        if response.status_code not in _STATUSES:
            raise UpstreamError(502, f"Upstream answered with status {response.status_code}.")
        media_type = b"".join(values(raw, b"content-type")[:1]).partition(b";")[0].strip().lower()
        event_stream = media_type == _EVENT_STREAM
        streams = event_stream and response.status_code in _SUCCESS
        if streams and self._routes.retrieve_id(down.method, down.path) is not None:
            self._observer.replayed("upstream")
        looked_at = streams and mode is not Mode.OFF
        coding = b",".join(values(raw, b"content-encoding")).strip().lower()
        decoded = False
        if looked_at and coding not in _IDENTITY:  # observed bytes pass as they came, compressed
            decoded = looked_at = mode is Mode.ON and coding in DECODABLE
            self._observer.stream_compressed(decoded=decoded)
        head = response_headers(
            raw,
            request_id=down.request_id,
            event_stream=event_stream,
            rewritten=looked_at and mode is Mode.ON,
            decoded=decoded,
        )
        await down.start(response.status_code, head)
        if looked_at:
            await self._relay_stream(down, response, mode, coding=coding if decoded else b"")
        else:
            await self._pass(down, response)

    async def _pass(self, down: Downstream, response: UpstreamResponse) -> None:
        """Pass a body as it comes; a cut stays a cut, and so does silence without an end."""
        writer, now = down.writer, asyncio.get_running_loop().time
        silence = SilenceLimit(self._settings.upstream_idle_s, held_back=lambda: writer.paused)

        def take(chunk: bytes) -> None:
            silence.heard_at = now()
            writer.write(chunk)

        def take_http_chunk(http_chunk: bytes) -> int:
            if size := data_size(http_chunk):
                silence.heard_at = heard_at = now()
                writer.write_http_chunk(http_chunk, size, heard_at)
            return size

        try:
            async with silence:
                await down.pipe(response.stream, take, take_http_chunk)
        except (httpx.TransportError, TimeoutError) as error:
            down.record.outcome = Outcome.LOST
            log.warning(
                "upstream broke off within a body",
                error=str(error) or "it was silent for too long",
                **_names(down),
            )
            writer.cut()
        else:
            writer.end()

    async def _relay_stream(
        self, down: Downstream, response: UpstreamResponse, mode: Mode, *, coding: bytes
    ) -> None:
        relay = StreamRelay(
            down, response.stream, mode=mode, settings=self._settings, held=self._held
        )
        record, corrector = down.record, relay.corrector
        try:
            with self._drain.stream(relay):
                await relay.run(coding=coding)
        finally:
            relay.close()
            record.note_stream(corrector, relay.outcome)
            record.mode, record.events = mode, corrector.events
            record.first_event_at = relay.first_event_at
            first = relay.first_event_at
            self._observer.stream_ended(
                corrector,
                mode,
                relay.outcome,
                seconds=asyncio.get_running_loop().time() - record.began_at,
                first_event_s=None if first is None else first - record.began_at,
            )
            if relay.outcome is Outcome.LOST:
                log.warning(
                    "upstream was lost within a stream",
                    error=str(relay.lost or "") or lost_message(relay.lost),
                    response_id=record.response_id,
                    **_names(down),
                )


def _names(down: Downstream) -> dict[str, str]:
    """Return what tells of which request a log line speaks."""
    return {"route": down.record.route, "request_id": down.record.request_id}
