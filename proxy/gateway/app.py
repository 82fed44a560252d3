"""The composition root: settings in, the applications of both ports out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.gateway.relay import Relay
from proxy.operations.admin import build_admin
from proxy.operations.metrics import Metrics
from proxy.upstream.client import UpstreamClient

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from proxy.settings import Settings

__all__ = ["Gateway"]


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
        self.traffic: ASGIApp = Relay(settings, self.client, self.metrics)
        self.admin: ASGIApp = build_admin(self.metrics)

    async def aclose(self) -> None:
        """Close upstream's connections; harmless when repeated."""
        await self.client.aclose()
