"""The account of the bytes that are held in all: one limit over everything that may grow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["HeldBytes", "Share"]


class HeldBytes:
    """How many bytes are ``held``, and the ``limit`` on what is added by asking."""

    __slots__ = ("held", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def share(self) -> Share:
        """Return an empty share for one holder."""
        return Share(self)


class Share:
    """What one holder has of an account; ``close``, or leaving a ``with`` block, empties it."""

    __slots__ = ("_account", "size")

    def __init__(self, account: HeldBytes) -> None:
        self._account = account
        self.size = 0

    def ask(self, size: int) -> bool:
        """Add so many bytes if the account has room for them; False, and no change, if not."""
        if self._account.held + size > self._account.limit:
            return False
        self.add(size)
        return True

    def add(self, size: int) -> None:
        """Add bytes that are there already, whatever the limit says."""
        self.size += size
        self._account.held += size

    def close(self) -> None:
        """Give everything back; harmless when repeated."""
        self._account.held -= self.size
        self.size = 0

    def __enter__(self) -> Self:
        """Begin to hold."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Hold no more."""
        self.close()
