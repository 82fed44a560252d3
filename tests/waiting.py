"""What scripts and tests wait for: conditions and gates instead of times."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 60.0
"""The longest that a test waits for anything: a bound, never an expectation.

A loaded virtual machine may stop for many seconds at once.
"""


class Signal:
    """Wakes all who wait for a condition whenever anything may have changed."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Let every waiter look again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait until the predicate holds."""
        while not predicate():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)


class Gate:
    """A place in a script where it waits until the test lets it go on."""

    def __init__(self) -> None:
        self._arrived = asyncio.Event()
        self._opened = asyncio.Event()

    def open(self) -> None:
        """Let the script go on, now or when it comes here."""
        self._opened.set()

    async def arrived(self) -> None:
        """Wait until a script stands here."""
        async with asyncio.timeout(PATIENCE_S):
            await self._arrived.wait()

    async def pass_through(self) -> None:
        """Stand here until the gate is open."""
        self._arrived.set()
        await self._opened.wait()
