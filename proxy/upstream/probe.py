"""Ask upstream every second whether it is well."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import structlog

from proxy.errors import RequestError

if TYPE_CHECKING:
    from proxy.upstream.client import UpstreamClient

__all__ = ["UpstreamProbe"]

EVERY_S = 1.0
# A busy vLLM answers late; one that is down mostly refuses at once.
ANSWER_S = 3.0
_ANSWER_BYTES = 64 * 1024
_SERVER_ERROR = 500

log = structlog.stdlib.get_logger("lastword")


class UpstreamProbe:
    """Whether upstream is well: ``GET /health`` once a second while ``run`` runs.

    vLLM answers 200, and 503 once its engine is dead.  Any other answer below 500 is that of a
    server which has no such route, or wants a key for it, and is there all the same.  ``up`` is
    false until the first success; from there on two equal results in a row change it.
    ``trouble`` says what the last result was if it was a failure.
    """

    def __init__(self, client: UpstreamClient) -> None:
        self._client = client
        self._doubts = 0  # results in a row that contradict `up`
        self._seen = False
        self._told = False
        self.up = False
        self.trouble: str | None = "It was not asked yet."

    async def run(self) -> None:
        """Ask until cancelled, whatever comes."""
        loop = asyncio.get_running_loop()
        while True:
            begun_at = loop.time()
            self.take(await self._ask())
            await asyncio.sleep(max(0.0, begun_at + EVERY_S - loop.time()))

    def take(self, trouble: str | None) -> None:
        """Take one result: None for a success, else what went wrong, as a sentence."""
        self.trouble = trouble
        well = trouble is None
        self._doubts = 0 if well is self.up else self._doubts + 1
        if self._doubts > 1 or (well and not self._seen):
            self._doubts = 0
            self._seen = True
            self.up = well
            if well:
                log.info("upstream is well")
            else:
                log.warning("upstream is not well", error=trouble)
        elif not (well or self._seen or self._told):
            self._told = True
            log.warning("upstream is not well yet", error=trouble)

    async def _ask(self) -> str | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                status = await self._status()
        except TimeoutError:
            return f"It did not answer GET /health within {ANSWER_S:g} s."
        except RequestError as error:
            return error.message
        except httpx.TransportError as error:
            return f"It broke off its answer to GET /health: {error}."
        except Exception as error:
            log.exception("asking upstream failed inside the proxy")
            return f"Asking it failed: {error}."
        return f"It answers GET /health with {status}." if status >= _SERVER_ERROR else None

    async def _status(self) -> int:
        headers = [(b"host", self._client.origin_host), (b"accept-encoding", b"identity")]
        response = await self._client.open("GET", b"/health", headers, b"")
        try:
            left = _ANSWER_BYTES
            async for chunk in response.stream:  # to its end, so that the connection is kept
                left -= len(chunk)
                if left < 0:
                    break
        finally:
            await response.stream.aclose()
        return response.status_code
