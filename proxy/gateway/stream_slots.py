"""How many streams may run at once."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from proxy.errors import FullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["StreamSlots"]


class StreamSlots:
    """Count the requests on the two Responses routes, WebSockets, and what else runs by ``others``.

    With ``limit`` None there is no limit.
    """

    def __init__(self, limit: int | None, *, others: Callable[[], int]) -> None:
        self._limit = limit
        self._others = others
        self._requests = 0

    @property
    def taken(self) -> int:
        """How many run now."""
        return self._requests + self._others()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a request while the block runs; raises ``FullError`` (503) if it is too many."""
        if self._limit is not None and self.taken >= self._limit:
            raise FullError("max_streams")
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
