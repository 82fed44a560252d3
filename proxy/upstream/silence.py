"""A limit on how long upstream may be silent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["SilenceLimit"]

_LOOK_AGAIN_S = 1.0


class SilenceLimit:
    """Raise ``TimeoutError`` in an ``async with`` block once ``idle_s`` have passed unheard.

    ``heard_at`` is set for every chunk to the loop's time; the timer behind it runs once per
    ``idle_s``.  With 0 there is no limit.  Time in which ``held_back`` says that upstream
    is not read does not count.  ``end_after`` sets a last limit instead.
    """

    __slots__ = (
        "_held_back",
        "_idle_s",
        "_left",
        "_limit",
        "_looked_at",
        "_loop",
        "_timer",
        "heard_at",
    )

    def __init__(self, idle_s: float, *, held_back: Callable[[], bool] | None = None) -> None:
        self._idle_s = idle_s
        self._held_back = held_back
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()
        self._looked_at = 0.0
        self._left = False
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def silent_s(self) -> float:
        """For how many seconds nothing was heard."""
        return self._loop.time() - self.heard_at

    def end_after(self, seconds: float) -> None:
        """End the block in so many seconds, heard or not; nothing happens once it was left."""
        self._stop()
        if self._left:
            return
        self._limit.reschedule(self._loop.time() + seconds)

    async def __aenter__(self) -> Self:
        """Begin to listen."""
        await self._limit.__aenter__()
        if self._idle_s:
            self._timer = self._loop.call_later(self._idle_s, self._check)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop listening."""
        self._left = True
        self._stop()
        await self._limit.__aexit__(kind, error, trace)

    def _check(self) -> None:
        if self._held_back is not None and self._held_back():
            self.heard_at = self._loop.time()
        due = self.heard_at + self._idle_s
        if due <= self._loop.time():
            # Timers run before sockets are read: after a pause of our own, what upstream has
            # sent meanwhile is yet to be read. So look once more.
            if self._looked_at == self.heard_at:
                self._limit.reschedule(self._loop.time())
                return
            self._looked_at = self.heard_at
            self._timer = self._loop.call_later(min(_LOOK_AGAIN_S, self._idle_s / 10), self._check)
        else:
            self._timer = self._loop.call_at(due, self._check)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
