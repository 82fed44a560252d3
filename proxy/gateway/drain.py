"""Stop taking requests, let the running ones finish, then end what is left."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Drain", "Stoppable"]


class Stoppable(Protocol):
    """A stream that can be ended properly before its upstream ends it."""

    def stop(self, reason: str) -> None:
        """End the stream now and tell the client why."""


class Drain:
    """How far a proxy is on its way down, and what still runs.

    ``draining``: not ready, still serving for ``delay_s``; ``refusing``: new requests are 503.
    """

    def __init__(self, *, delay_s: float, grace_s: float) -> None:
        self._delay_s = delay_s
        self._grace_s = grace_s
        self._streams: set[Stoppable] = set()
        self._hurry = asyncio.Event()
        self._changed = asyncio.Event()
        self._refuse_at: float | None = None
        self.active = 0
        self.draining = False

    @property
    def streams(self) -> int:
        """How many streams are known."""
        return len(self._streams)

    @property
    def refusing(self) -> bool:
        """Whether new requests are turned away."""
        return self._refuse_at is not None and asyncio.get_running_loop().time() >= self._refuse_at

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while the block runs."""
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1
            self._changed.set()

    @contextmanager
    def stream(self, stream: Stoppable) -> Iterator[None]:
        """Know a stream while the block runs, to end it when the time is up."""
        self._streams.add(stream)
        try:
            yield
        finally:
            self._streams.discard(stream)

    async def drain(self) -> bool:
        """Refuse new requests after ``delay_s`` and wait until none runs; False after ``grace_s``.

        May be called again: the delay counts from the first call.
        """
        loop = asyncio.get_running_loop()
        self.draining = True
        if self._refuse_at is None:
            self._refuse_at = loop.time() + self._delay_s
        await self._pause(max(0.0, self._refuse_at - loop.time()))
        give_up_at = loop.time() + self._grace_s
        while self.active and not self._hurry.is_set() and loop.time() < give_up_at:
            self._changed.clear()
            await self._pause(give_up_at - loop.time(), also=self._changed)
        return not self.active

    def hurry(self) -> None:
        """Wait for nobody any more."""
        self._hurry.set()
        self._changed.set()

    def stop_streams(self, reason: str) -> None:
        """End every stream that still runs."""
        for stream in list(self._streams):
            stream.stop(reason)

    async def emptied(self, limit_s: float) -> None:
        """Wait a moment for what was stopped to be gone."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + limit_s
        while self.active and loop.time() < give_up_at:
            self._changed.clear()
            await self._pause(give_up_at - loop.time(), also=self._changed)

    async def _pause(self, seconds: float, *, also: asyncio.Event | None = None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await (also or self._hurry).wait()
