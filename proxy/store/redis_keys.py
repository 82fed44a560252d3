"""The names of everything that the store keeps in Redis, all behind one prefix."""

from __future__ import annotations

from proxy.store import CopyKey

__all__ = ["Keys", "from_member", "to_member"]


class Keys:
    """Names keys: a few for each copy, a few for all copies together.

    ``open`` holds the open copies by the end of their lease, ``ended`` the others by their end,
    ``news`` tells every process what has happened to copies.
    """

    def __init__(self, prefix: str) -> None:
        self._copy = f"{prefix}copy:".encode()
        self._events = f"{prefix}events:".encode()
        self._claim = f"{prefix}claim:".encode()
        self._wake = f"{prefix}wake:".encode()
        self.open = f"{prefix}open".encode()
        self.ended = f"{prefix}ended".encode()
        self.totals = f"{prefix}totals".encode()
        self.ids = f"{prefix}ids".encode()
        self.news = f"{prefix}news".encode()
        self._shared = (
            self.open,
            self.ended,
            f"{prefix}sizes".encode(),
            self.totals,
            f"{prefix}gone".encode(),
            f"{prefix}gone-at".encode(),
            self.ids,
            self.news,
        )

    def of(self, member: bytes) -> tuple[bytes, ...]:
        """Name all keys that a script on one copy works with, in the scripts' order."""
        return self.copy(member), self.events(member), self.claim(member), *self._shared

    def copy(self, member: bytes) -> bytes:
        """Name the hash of a copy."""
        return self._copy + member

    def events(self, member: bytes) -> bytes:
        """Name the stream of a copy's rows."""
        return self._events + member

    def claim(self, member: bytes) -> bytes:
        """Name the claim that stands before a copy."""
        return self._claim + member

    def wake(self, process: str) -> bytes:
        """Name the stream that wakes the shared reader of one process."""
        return self._wake + process.encode()


def to_member(key: CopyKey) -> bytes:
    """Write a copy's key as one string."""
    return f"{key.owner}:{key.response_id}".encode()


def from_member(member: bytes) -> CopyKey:
    """Read a copy's key back; an owner is hex and has no colon."""
    owner, _, response_id = member.decode().partition(":")
    return CopyKey(owner, response_id)
