"""Short streams, one after the other on an open connection, that time the first byte of a body."""

from __future__ import annotations

import asyncio
import time
from typing import Final, cast

import httptools

_STEP_S: Final = 0.01  # so that the probes themselves are no load


async def first_bytes(port: int, request: bytes, seconds: float) -> tuple[list[int], int]:
    """Probe for so long, at least once.

    Returns the times from a request's write to its body's first byte, in nanoseconds, and how many
    probes were cut off.  The first request warms the way up and is not timed.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    times: list[int] = []
    _, probe = await loop.create_connection(_Probe, "127.0.0.1", port)
    try:
        await probe.ask(request)
        while not times or loop.time() < end:
            times.append(await probe.ask(request))
            await asyncio.sleep(_STEP_S)
    except ConnectionError:
        return times, 1
    probe.close()
    return times, 0


class _Probe(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._asked_at = self._heard_at = 0
        self._answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    async def ask(self, request: bytes) -> int:
        """Return how long the first byte took, when the whole answer has come."""
        self._answer = asyncio.get_running_loop().create_future()
        self._heard_at = 0
        self._asked_at = time.monotonic_ns()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        """Leave."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Read an answer."""
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Note when its first byte came."""
        self._heard_at = self._heard_at or time.monotonic_ns()

    def on_message_complete(self) -> None:
        """Be answered."""
        if not self._answer.done():
            self._answer.set_result(self._heard_at - self._asked_at)

    def connection_lost(self, exc: Exception | None) -> None:
        """Be answered with what happened."""
        if not self._answer.done():
            self._answer.set_exception(ConnectionResetError("the probe was cut off"))
