"""The composition root: settings in, the applications of both ports out."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from proxy.background.owner import Owners
from proxy.background.runs import Runs
from proxy.errors import SettingsError
from proxy.gateway.background import BackgroundRoutes
from proxy.gateway.drain import Drain
from proxy.gateway.relay import Relay
from proxy.operations.admin import build_admin
from proxy.operations.metrics import Metrics
from proxy.store import Limits, StoreError
from proxy.store.opening import open_store, owner_secret
from proxy.upstream.client import UpstreamClient

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
        self.metrics = Metrics()
        self.client = UpstreamClient(settings)
        self.runs: Runs | None = None
        background: BackgroundRoutes | None = None
        if settings.keeps_copies:
            self.runs, owners = _open_runs(settings, self.client, self.metrics)
            background = BackgroundRoutes(settings, self.client, self.runs, owners)
        self.drain = Drain(delay_s=settings.drain_delay_s, grace_s=settings.shutdown_grace_s)
        self.traffic: ASGIApp = Relay(settings, self.client, self.metrics, background, self.drain)
        self.admin: ASGIApp = build_admin(self.metrics, self.drain)

    async def start(self) -> None:
        """Take care of what an earlier process left open."""
        if self.runs is not None:
            try:
                await self.runs.start()
            except StoreError as error:
                raise SettingsError(f"--store: {error}") from error

    async def shut_down(self) -> None:
        """Drain, then end properly what still runs: streams and runs alike."""
        await self.drain.drain()
        self.drain.stop_streams(_REASON)
        if self.runs is not None:
            await self.runs.aclose(_REASON)
        await self.drain.emptied(_STOPPED_S)

    async def aclose(self) -> None:
        """Let go of the store and of upstream's connections; harmless when repeated."""
        if self.runs is not None:
            await self.runs.aclose()
        await self.client.aclose()


def _open_runs(settings: Settings, client: UpstreamClient, metrics: Metrics) -> tuple[Runs, Owners]:
    limits = Limits(
        copy_ttl_s=settings.copy_ttl_s,
        tombstone_ttl_s=settings.tombstone_ttl_s,
        max_copy_bytes=settings.max_copy_bytes,
        max_store_bytes=settings.max_store_bytes,
    )
    url = settings.store.get_secret_value()
    given = settings.owner_secret
    try:
        store = open_store(url, limits, prefix=settings.redis_prefix, lease_s=settings.lease_s)
        secret = given.get_secret_value().encode() if given else owner_secret(url)
    except StoreError as error:
        raise SettingsError(f"--store: {error}") from error
    if settings.shares_store:
        metrics.watch_store(lambda: cast("SharedStore", store).up)
    names = [name.strip().lower().encode() for name in settings.owner_headers.split(",")]
    owners = Owners([name for name in names if name], secret)
    return Runs(settings, client, store, metrics), owners
