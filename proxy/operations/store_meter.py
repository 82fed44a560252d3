"""Measure how long a store takes to keep what it is given."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client import Histogram

    from proxy.store import Block, CopyKey, Store

__all__ = ["metered"]


def metered(store: Store, appends: Histogram) -> Store:
    """Return the same store, whose ``append`` is timed, in seconds, where it succeeds."""
    return cast("Store", _Metered(store, appends))


class _Metered:
    def __init__(self, store: Store, appends: Histogram) -> None:
        self._store = store
        self._appends = appends

    def __getattr__(self, name: str) -> Any:
        """Give everything else as the store itself has it."""
        return getattr(self._store, name)

    async def append(
        self, key: CopyKey, after: int, blocks: Sequence[Block], *, snapshot: bytes | None = None
    ) -> None:
        begun = time.perf_counter()
        await self._store.append(key, after, blocks, snapshot=snapshot)
        self._appends.observe(time.perf_counter() - begun)
