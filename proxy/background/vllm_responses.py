"""What vLLM itself is asked of responses that it makes: for one as it is, or to cancel one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from proxy.background.answer import Answer, read_answer

if TYPE_CHECKING:
    from proxy.upstream.client import UpstreamClient
    from proxy.upstream.headers import Pairs

__all__ = ["VllmResponses", "without_body"]

CANCEL_WAIT_S = 5.0
_BODY_HEADERS = frozenset({b"content-length", b"content-type", b"transfer-encoding"})

log = structlog.stdlib.get_logger("lastword")


def without_body(headers: Pairs) -> Pairs:
    """Return the headers of a request that also suit one without a body."""
    return [pair for pair in headers if pair[0] not in _BODY_HEADERS]


class VllmResponses:
    """Asks vLLM with an owner's headers; raises ``RequestError`` where it cannot be asked."""

    def __init__(self, client: UpstreamClient) -> None:
        self._client = client

    async def get(self, target: bytes, headers: Pairs) -> Answer:
        """Get a response object, or whatever vLLM answers instead."""
        response = await self._client.open("GET", target, without_body(headers), b"")
        try:
            return await read_answer(response)
        finally:
            await response.stream.aclose()

    async def cancel(self, target: bytes, headers: Pairs) -> None:
        """Cancel at vLLM, whatever it answers; one that does not answer is left to itself soon.

        vLLM answers a cancel when it has ended the generation, or never if it hangs.
        """
        try:
            async with asyncio.timeout(CANCEL_WAIT_S):
                response = await self._client.open("POST", target, without_body(headers), b"")
                await response.stream.aclose()
        except TimeoutError:
            log.warning(
                "vLLM has not answered a cancel: it may go on generating",
                target=target.decode("latin-1"),
                waited_s=CANCEL_WAIT_S,
            )
