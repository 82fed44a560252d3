"""The admin port's application."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import proxy

if TYPE_CHECKING:
    from proxy.operations.metrics import Metrics

__all__ = ["build_admin"]


def build_admin(metrics: Metrics) -> FastAPI:
    """Return the application that tells how the proxy is."""
    app = FastAPI(title="Lastword", version=proxy.__version__, redirect_slashes=False)

    @app.get("/livez", response_class=PlainTextResponse)
    async def livez() -> str:
        """Say ok while the process serves at all."""
        return "ok\n"

    @app.get("/metrics", response_class=Response)
    async def show_metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app
