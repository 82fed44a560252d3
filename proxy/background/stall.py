"""Ask a vLLM that has fallen silent how its background response is.

vLLM leaves the stream of a cancelled or failed background response open for ever, and that of an
engine that died too.  From 0.18 on it keeps saying ``queued`` of a failed one; that cannot be told
from a long prefill, so only ``upstream_idle_s`` ends it.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING

import httpx

from proxy.core.responses import read_payload
from proxy.errors import UpstreamError

if TYPE_CHECKING:
    from proxy.upstream.client import UpstreamClient
    from proxy.upstream.headers import Pairs

__all__ = ["Finding", "StallCheck"]

_OK = 200
_NOT_FOUND = 404
_SERVER_ERROR = 500
_ANSWER_BYTES = 64 * 1024 * 1024
_ASK_S = 5.0


class Finding(StrEnum):
    """What a silent upstream says of a response."""

    RUNNING = "running"
    CANCELLED = "cancelled"
    FAILED = "failed"
    FINISHED = "finished"  # completed or incomplete: its events are there to be read again
    GONE = "gone"
    DOWN = "down"


_FINDINGS = {
    "cancelled": Finding.CANCELLED,
    "failed": Finding.FAILED,
    "completed": Finding.FINISHED,
    "incomplete": Finding.FINISHED,
}


class StallCheck:
    """Asks about one response; ``DOWN`` is found only after ``down_s`` of trouble."""

    def __init__(
        self, client: UpstreamClient, target: bytes, headers: Pairs, *, down_s: float
    ) -> None:
        self._client = client
        self._target = target
        self._headers = headers
        self._down_s = down_s
        self._down_since: float | None = None

    async def ask(self) -> Finding:
        """Ask for the response and for vLLM's health; takes a few seconds at most."""
        try:
            async with asyncio.timeout(_ASK_S):
                status, body = await self._get(self._target)
                healthy, _ = await self._get(b"/health")
        except (UpstreamError, httpx.TransportError, TimeoutError):
            return self._trouble()
        if status == _NOT_FOUND:
            return Finding.GONE
        payload = read_payload(b'{"response":%b}' % body) if status == _OK else None
        finding = _FINDINGS.get((payload.status if payload else None) or "", Finding.RUNNING)
        if finding is Finding.RUNNING and healthy >= _SERVER_ERROR:
            return self._trouble()
        self._down_since = None
        return finding

    def _trouble(self) -> Finding:
        now = asyncio.get_running_loop().time()
        if self._down_since is None:
            self._down_since = now
        return Finding.DOWN if now - self._down_since >= self._down_s else Finding.RUNNING

    async def _get(self, target: bytes) -> tuple[int, bytes]:
        response = await self._client.open("GET", target, self._headers, b"")
        body = bytearray()
        try:
            async for chunk in response.stream:
                body += chunk
                if len(body) > _ANSWER_BYTES:
                    break
        finally:
            await response.stream.aclose()
        return response.status_code, bytes(body)
