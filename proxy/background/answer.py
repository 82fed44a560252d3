"""What upstream answers to a create: an event stream, or something else that is passed on whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from proxy.errors import UpstreamError
from proxy.upstream.headers import values

if TYPE_CHECKING:
    from proxy.upstream.client import UpstreamResponse
    from proxy.upstream.headers import Pairs

__all__ = ["Answer", "is_event_stream", "read_answer"]

_ANSWER_BYTES = 16 * 1024 * 1024
_SUCCESS = range(200, 300)


@dataclass(frozen=True)
class Answer:
    """What upstream answered instead of a stream: passed to the client as it is."""

    status: int
    headers: Pairs
    body: bytes


def is_event_stream(response: UpstreamResponse) -> bool:
    """Whether upstream began an event stream."""
    media_type = b"".join(values(response.headers.raw, b"content-type")[:1])
    return (
        response.status_code in _SUCCESS
        and media_type.partition(b";")[0].strip().lower() == b"text/event-stream"
    )


async def read_answer(response: UpstreamResponse) -> Answer:
    """Read a whole answer; raises ``UpstreamError`` if it breaks off or is too large."""
    body = bytearray()
    try:
        async for chunk in response.stream:
            body += chunk
            if len(body) > _ANSWER_BYTES:
                raise UpstreamError(502, "The upstream server's answer is too large.")
    except httpx.TransportError as error:
        raise UpstreamError(502, f"The upstream server broke off: {error}.") from error
    return Answer(response.status_code, response.headers.raw, bytes(body))
