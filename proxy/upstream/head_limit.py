"""A limit on how long upstream may take to answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["HeadLimit"]


class HeadLimit:
    """Fail an exchange when upstream alone was waited for, without progress, for `limit_s`.

    `unsent` tells how many bytes of the request wait to be taken, and whether more of it is to come
    from its caller; `fail` is given the error. The timer runs until `stop`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limit_s: float,
        *,
        unsent: Callable[[], tuple[int, bool]],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._unsent = unsent
        self._fail = fail
        self._unsent_bytes = 0
        self._progress_at = loop.time()
        self._timer = loop.call_at(self._progress_at + limit_s, self._check)

    def progress(self) -> None:
        """Take note that upstream has taken something."""
        self._progress_at = self._loop.time()

    def stop(self) -> None:
        """Wait no more; harmless when repeated."""
        self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        unsent, more_to_come = self._unsent()
        if more_to_come or unsent != self._unsent_bytes:
            self._unsent_bytes, self._progress_at = unsent, now
        due = self._progress_at + self._limit_s
        if due > now:
            self._timer = self._loop.call_at(due, self._check)
        else:
            self._fail(
                httpx.ReadTimeout(f"upstream sent no response head within {self._limit_s:g} s")
            )
