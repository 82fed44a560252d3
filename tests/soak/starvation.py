"""Whether the machine was too busy for the soak to judge what depends on time."""

from __future__ import annotations

import asyncio

from tests.soak.plan import STARVED_S

_LOOK_S = 0.1


class Starvation:
    """Notes when this process, and so the proxy beside it, got no processor for a while."""

    def __init__(self) -> None:
        self.times = 0
        self.longest_s = 0.0
        self._last = float("-inf")

    async def watch(self) -> None:
        """Look for as long as the task runs."""
        loop = asyncio.get_running_loop()
        while True:
            slept_at = loop.time()
            await asyncio.sleep(_LOOK_S)
            late_s = loop.time() - slept_at - _LOOK_S
            self.longest_s = max(self.longest_s, late_s)
            if late_s > STARVED_S:
                self.times += 1
                self._last = loop.time()

    def since(self, start: float) -> bool:
        """Whether it was so at any time since then, on the loop's clock."""
        return self._last >= start
