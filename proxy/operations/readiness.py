"""Whether new requests should be sent here, and why not."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel, Field

from proxy.store import StoreError

if TYPE_CHECKING:
    from proxy.operations.metrics import Metrics
    from proxy.store import Store
    from proxy.store.shared import SharedStore
    from proxy.upstream.probe import UpstreamProbe

__all__ = ["Check", "Readiness", "Report"]

# A store that takes longer to tell its size would hold up an admin request.
_STORE_S = 1.0


class Check(BaseModel):
    """One thing that was looked at."""

    ok: bool | None = Field(description="null where it is not looked at.")
    needed: bool = Field(description="Whether the proxy is ready only if this is ok.")
    detail: str = Field(description="What was found, in a sentence.")


class Report(BaseModel):
    """Whether new requests should be sent here, check by check."""

    ready: bool
    checks: dict[str, Check] = Field(description="upstream, store and draining.")


class _Draining(Protocol):
    """What readiness asks of a drain."""

    draining: bool


class Readiness:
    """Looks at the drain, upstream's probe and the store, each as far as there is one.

    A store that is away never makes the proxy unready: streams pass without it.  ``shared`` is the
    store too, where it knows by itself whether it is away.
    """

    def __init__(
        self,
        metrics: Metrics,
        drain: _Draining,
        probe: UpstreamProbe | None,
        store: Store | None,
        *,
        shared: SharedStore | None = None,
    ) -> None:
        self._metrics = metrics
        self._drain = drain
        self._probe = probe
        self._store = store
        self._shared = shared

    @property
    def ready(self) -> bool:
        """Whether new requests should be sent here."""
        return not self._drain.draining and (self._probe is None or self._probe.up)

    async def report(self) -> Report:
        """Look at everything; takes a second at most."""
        return Report(
            ready=self.ready,
            checks={
                "draining": self._check_drain(),
                "upstream": self._check_upstream(),
                "store": await self._check_store(),
            },
        )

    async def measure(self) -> None:
        """Bring the gauges of upstream and store up to date; takes a second at most.

        What is not looked at is NaN, so that no alert takes it for down.
        """
        metrics = self._metrics
        metrics.ready.set(self.ready)
        metrics.upstream_up.set(math.nan if self._probe is None else self._probe.up)
        metrics.store_up.set(math.nan)
        await self._check_store()

    def _check_drain(self) -> Check:
        if self._drain.draining:
            return Check(
                ok=False, needed=True, detail="It is stopping: new requests should go elsewhere."
            )
        return Check(ok=True, needed=True, detail="It takes new requests.")

    def _check_upstream(self) -> Check:
        probe = self._probe
        if probe is None:
            return Check(ok=None, needed=False, detail="It is not asked (ready_needs_upstream).")
        if probe.trouble is None:
            return Check(ok=probe.up, needed=True, detail="It answers GET /health.")
        return Check(ok=probe.up, needed=True, detail=probe.trouble)

    async def _check_store(self) -> Check:
        if self._store is None:
            return Check(ok=None, needed=False, detail="No copies are kept.")
        if self._shared is not None and not self._shared.up:  # it may still answer reads
            self._metrics.store_up.set(0)
            return Check(ok=False, needed=False, detail="It is away, or takes no writes.")
        try:
            async with asyncio.timeout(_STORE_S):
                size = await self._store.size()
        except (StoreError, TimeoutError) as error:
            self._metrics.store_up.set(0)
            told = str(error) or f"It does not answer within {_STORE_S:g} s."
            return Check(ok=False, needed=False, detail=told)
        self._metrics.store_up.set(1)
        self._metrics.store_bytes.set(size)
        return Check(ok=True, needed=False, detail=f"It holds {size} bytes.")
