"""Hold a stream back until it is sure that its run is still this process's to make."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from proxy.background.feed import State
from proxy.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.background.run import Run
    from proxy.store.shared import SharedStore
    from proxy.upstream.body import ChunkSink, UpstreamStream

__all__ = ["LeaseLook"]


class LeaseLook:
    """Looks at the leases before an event goes on, if this process has stood still for too long.

    Another replica may have ended the run meanwhile: then what still comes is dropped. ``take``
    gets the rest of the stream otherwise; upstream is held back during the look.
    """

    def __init__(
        self,
        shared: SharedStore,
        run: Run,
        stream: UpstreamStream,
        take: Callable[[bytes], None],
        take_http_chunk: ChunkSink,
    ) -> None:
        self._shared = shared
        self._run = run
        self._stream = stream
        self._take = take
        self._take_http_chunk = take_http_chunk
        self._held: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    def take(self, chunk: bytes) -> None:
        """Take one chunk from upstream's socket."""
        if self._task is not None:
            self._held.append(chunk)
        elif self._shared.lease_overdue:
            self._held = [chunk]
            self._stream.pause()
            self._task = asyncio.create_task(self._look())  # noqa: TID251 - see settled
        else:
            self._take(chunk)

    def take_http_chunk(self, http_chunk: bytes) -> int:
        """Take a whole HTTP chunk, or leave it to ``take`` where it must wait."""
        if self._task is not None or self._shared.lease_overdue:
            return 0
        return self._take_http_chunk(http_chunk)

    async def settled(self) -> None:
        """Wait until nothing is held any more; the end of one look may begin another."""
        while self._task is not None:
            await self._task

    async def _look(self) -> None:
        with suppress(StoreError):  # a store that is away holds no live event back
            await self._shared.renew_leases()
        self._task = None
        if self._run.state is not State.MOVED:
            self._stream.resume()
            self.take(b"".join(self._held))
