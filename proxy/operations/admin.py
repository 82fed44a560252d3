"""The admin port's application."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Protocol

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import proxy
from proxy.operations.readiness import Report

if TYPE_CHECKING:
    from proxy.operations.metrics import Metrics
    from proxy.operations.readiness import Readiness
    from proxy.settings import Settings

__all__ = ["build_admin"]

# Not all of 127.0.0.0/8: a mesh's sidecar brings the whole network from there (Istio: 127.0.0.6).
_THIS_HOST = frozenset({"127.0.0.1", "::1"})


class _Draining(Protocol):
    """What the admin port asks of a drain."""

    active: int

    async def drain(self) -> bool:
        """Refuse new requests and wait for the running ones."""


def build_admin(
    settings: Settings, metrics: Metrics, drain: _Draining, readiness: Readiness
) -> FastAPI:
    """Return the application that tells how the proxy is.

    Its routes are described at ``/openapi.json``.  FastAPI's page for it would be loaded from
    elsewhere, which an admin port should neither need nor do.
    """
    app = FastAPI(
        title="Lastword",
        version=proxy.__version__,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )

    @app.get("/livez", response_class=PlainTextResponse)
    async def livez() -> str:
        """Say ok while the process serves at all."""
        return "ok\n"

    @app.get("/readyz", responses={503: {"model": Report, "description": "Not ready"}})
    async def readyz(response: Response) -> Report:
        """Say whether new requests should be sent here, and what was looked at."""
        report = await readiness.report()
        response.status_code = 200 if report.ready else 503
        return report

    @app.post("/drain")
    async def drain_now(request: Request) -> JSONResponse:
        """Take no new requests and answer when none runs any more, or the grace is over."""
        _check_from_here(request, "drain this proxy")
        drained = await drain.drain()
        return JSONResponse({"drained": drained, "active": drain.active})

    @app.get("/config")
    async def show_config(request: Request) -> JSONResponse:
        """Return the settings in force by name; what is secret in them is masked."""
        _check_from_here(request, "see how this proxy is set")
        return JSONResponse(settings.shown())

    @app.get("/metrics", response_class=Response)
    async def show_metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        await readiness.measure()
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _check_from_here(request: Request, what: str) -> None:
    """Refuse (403) whoever does not ask from this host, and every web page that does."""
    peer = request.client.host if request.client else ""
    if peer not in _THIS_HOST:
        raise HTTPException(403, f"Only a peer at 127.0.0.1 or ::1 may {what}.")
    name = request.url.hostname or ""
    if name != "localhost" and not _is_address(name):  # a web page's name that leads here
        raise HTTPException(403, f"Only a URL with an address or localhost as its host may {what}.")
    if "origin" in request.headers:
        raise HTTPException(403, f"No web page may {what}: a request with an Origin is refused.")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
