"""The composition root: settings in, the applications of both ports out."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from proxy.background.owner import Owners
from proxy.background.runs import Runs
from proxy.core.held_bytes import HeldBytes
from proxy.errors import SettingsError
from proxy.gateway.background import BackgroundRoutes
from proxy.gateway.drain import Drain
from proxy.gateway.relay import Relay
from proxy.gateway.stream_slots import StreamSlots
from proxy.operations.admin import build_admin
from proxy.operations.metrics import Metrics
from proxy.operations.readiness import Readiness
from proxy.operations.reporter import Reporter
from proxy.operations.store_meter import metered
from proxy.store import Limits, StoreError
from proxy.store.opening import open_store, owner_secret, store_limit
from proxy.upstream.client import UpstreamClient
from proxy.upstream.probe import UpstreamProbe

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from proxy.settings import Settings
    from proxy.store.shared import SharedStore

__all__ = ["Gateway"]

_REASON = "The proxy is shutting down."
_STOPPED_S = 1.0


class Gateway:
    """All parts of one proxy, put together once.

    The traffic port's application is a plain ASGI callable, not a FastAPI app: it answers
    nothing of its own, and a framework's middleware and exception layers would stand in every
    byte's way.  FastAPI serves the admin port.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.held = HeldBytes(settings.max_buffered_bytes)
        self.metrics = metrics = Metrics()
        self.reporter = Reporter(metrics, log_requests=settings.log_requests)
        self.client = UpstreamClient(settings)
        self.drain = Drain(delay_s=settings.drain_delay_s, grace_s=settings.shutdown_grace_s)
        self.probe = UpstreamProbe(self.client) if settings.ready_needs_upstream else None
        self._probing: asyncio.Task[None] | None = None
        self.runs: Runs | None = None
        self.slots = StreamSlots(
            settings.max_streams, others=lambda: self.runs.active if self.runs is not None else 0
        )
        metrics.active_streams.set_function(lambda: self.drain.streams)
        metrics.buffered_bytes.set_function(lambda: self.held.held)
        metrics.stream_slots.set_function(lambda: self.slots.taken)
        background: BackgroundRoutes | None = None
        if settings.keeps_copies:
            runs, owners = _open_runs(settings, self.client, metrics, self.reporter, self.held)
            routes = BackgroundRoutes(settings, self.client, runs, owners, self.reporter)
            self.runs, background = runs, routes
            metrics.active_runs.set_function(lambda: runs.active)
            metrics.active_followers.set_function(lambda: routes.followers)
        self.traffic: ASGIApp = Relay(
            settings,
            client=self.client,
            observer=self.reporter,
            background=background,
            drain=self.drain,
            held=self.held,
            slots=self.slots,
        )
        store = self.runs.store if self.runs is not None else None
        shared = cast("SharedStore", store) if store and settings.shares_store else None
        readiness = Readiness(metrics, self.drain, self.probe, store, shared=shared)
        self.admin: ASGIApp = build_admin(settings, metrics, self.drain, readiness)

    async def start(self) -> None:
        """Take care of what an earlier process left open, and begin to ask upstream."""
        if self.runs is not None:
            try:
                await self.runs.start()
            except StoreError as error:
                raise SettingsError(f"--store: {error}") from error
        if self.probe is not None:
            self._probing = asyncio.create_task(self.probe.run())  # noqa: TID251 - aclose ends it

    async def shut_down(self) -> None:
        """Drain, then end properly what still runs: streams and runs alike."""
        await self.drain.drain()
        self.drain.stop_streams(_REASON)
        if self.runs is not None:
            await self.runs.aclose(_REASON)
        await self.drain.emptied(_STOPPED_S)

    async def aclose(self) -> None:
        """Let go of the store and of upstream's connections; harmless when repeated."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        if self.runs is not None:
            await self.runs.aclose()
        await self.client.aclose()


def _open_runs(
    settings: Settings,
    client: UpstreamClient,
    metrics: Metrics,
    reporter: Reporter,
    held: HeldBytes,
) -> tuple[Runs, Owners]:
    limits = Limits(
        copy_ttl_s=settings.copy_ttl_s,
        tombstone_ttl_s=settings.tombstone_ttl_s,
        max_copy_bytes=settings.max_copy_bytes,
        max_store_bytes=settings.max_store_bytes,
    )
    url = settings.store.get_secret_value()
    given = settings.owner_secret
    try:
        opened = open_store(url, limits, prefix=settings.redis_prefix, lease_s=settings.lease_s)
        store = metered(opened, metrics.append_duration)
        secret = given.get_secret_value().encode() if given else owner_secret(url)
    except StoreError as error:
        raise SettingsError(f"--store: {error}") from error
    metrics.store_max_bytes.set(store_limit(url, limits))
    names = [name.strip().lower().encode() for name in settings.owner_headers.split(",")]
    owners = Owners([name for name in names if name], secret)
    return Runs(settings, client, store, reporter, held), owners
