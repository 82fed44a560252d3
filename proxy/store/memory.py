"""Copies in this process's memory: nothing on disk, nothing after a restart."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from proxy.store import (
    Block,
    CopyInfo,
    CopyKey,
    CopyLostError,
    Gone,
    Limits,
    StoreFullError,
    StoreUnavailableError,
    Tombstone,
)
from proxy.store.room import check_copy_room, check_store_room

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

__all__ = ["DEFAULT_MAX_BYTES", "MemoryStore"]

_READ_BYTES = 1024 * 1024
DEFAULT_MAX_BYTES = 256 * 1024 * 1024


@dataclass(slots=True)
class _Copy:
    meta: bytes
    snapshot: bytes
    created_at: float
    size: int
    ended_at: float | None = None
    blocks: list[Block] = field(default_factory=list)

    def info(self, key: CopyKey) -> CopyInfo:
        return CopyInfo(
            key=key,
            meta=self.meta,
            snapshot=self.snapshot,
            created_at=self.created_at,
            ended_at=self.ended_at,
            last_number=self.blocks[-1].number if self.blocks else -1,
            blocks=len(self.blocks),
            size=self.size,
        )


class MemoryStore:
    """A store that lives and dies with the process.

    No method waits for anything, so each is atomic among the tasks of one event loop.
    """

    def __init__(
        self, limits: Limits | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._limits = limits or Limits()
        given = self._limits.max_store_bytes
        self._max_bytes = DEFAULT_MAX_BYTES if given is None else given
        self._clock = clock
        self._open: dict[CopyKey, _Copy] = {}
        self._ended: dict[CopyKey, _Copy] = {}  # in the order in which they ended
        self._tombstones: dict[CopyKey, Tombstone] = {}  # in the order in which they were set
        self._known: Counter[str] = Counter()  # how many owners know each response id
        self._size = 0
        self._ended_size = 0
        self._closed = False

    async def create(self, key: CopyKey, *, meta: bytes, snapshot: bytes) -> CopyInfo | None:
        """Make an empty, open copy, or return the one that is there."""
        present = self._find(key)
        if present is not None:
            return present.info(key)
        size = len(meta) + len(snapshot)
        self._make_room(0, size)
        if self._tombstones.pop(key, None) is None:
            self._known[key.response_id] += 1
        self._open[key] = _Copy(meta, snapshot, self._clock(), size)
        self._size += size
        return None

    async def append(
        self, key: CopyKey, after: int, blocks: Sequence[Block], *, snapshot: bytes | None = None
    ) -> None:
        """Add blocks behind the ``after`` blocks that the copy holds."""
        copy = self._writable(key)
        if after != len(copy.blocks):
            raise CopyLostError(
                f"The copy of {key.response_id} holds {len(copy.blocks)} blocks, not {after}:"
                " its writer lost its place and must stop writing."
            )
        self._grow(key, copy, sum(len(block.raw) for block in blocks), snapshot)
        copy.blocks.extend(blocks)

    async def end(self, key: CopyKey, *, snapshot: bytes | None = None) -> None:
        """Mark the copy as ended now; the first end stands."""
        if key in self._ended:
            return
        copy = self._writable(key)
        self._grow(key, copy, 0, snapshot)
        copy.ended_at = self._clock()
        del self._open[key]
        self._ended[key] = copy
        self._ended_size += copy.size

    async def get(self, key: CopyKey) -> CopyInfo | Tombstone | None:
        """Tell what is known of a key."""
        copy = self._find(key)
        return self._tombstones.get(key) if copy is None else copy.info(key)

    async def known(self, response_id: str) -> bool:
        """Tell whether any owner has or had a copy under this id."""
        self._check_open()
        return response_id in self._known

    async def read(self, key: CopyKey, start: int = 0) -> AsyncGenerator[Sequence[Block], None]:
        """Yield the blocks from ``start`` on, in batches of at most 1 MiB or one block."""
        copy = self._find(key)
        end = 0 if copy is None else len(copy.blocks)
        while copy is not None and start < end and self._find(key) is copy:
            batch = [copy.blocks[start]]
            size = len(batch[0].raw)
            for index in range(start + 1, end):
                block = copy.blocks[index]
                size += len(block.raw)
                if size > _READ_BYTES:
                    break
                batch.append(block)
            start += len(batch)
            yield batch

    async def index_after(self, key: CopyKey, number: int) -> int:
        """Tell the index of the first block with a greater number."""
        copy = self._find(key)
        if copy is None:
            return 0
        return bisect_right(copy.blocks, number, key=lambda block: block.number)

    async def drop(self, key: CopyKey, reason: Gone) -> bool:
        """Remove a copy whole and leave a tombstone."""
        if self._find(key) is None:
            return False
        self._remove(key, reason)
        return True

    async def open_copies(self) -> Sequence[CopyInfo]:
        """List the copies that have not ended."""
        self._check_open()
        return [copy.info(key) for key, copy in self._open.items()]

    async def expire(self) -> Sequence[Tombstone]:
        """Remove what has outlived its time."""
        self._check_open()
        now = self._clock()
        oldest = now - self._limits.copy_ttl_s
        late = [
            key
            for key, copy in self._ended.items()
            if copy.ended_at is not None and copy.ended_at <= oldest
        ]
        oldest = now - self._limits.tombstone_ttl_s
        for stone in list(takewhile(lambda stone: stone.at <= oldest, self._tombstones.values())):
            self._forget(stone.key)
        return [self._remove(key, Gone.EXPIRED) for key in late]

    async def size(self) -> int:
        """Tell the bytes of all copies together."""
        self._check_open()
        return self._size

    async def aclose(self) -> None:
        """Forget everything."""
        self._closed = True
        self._open.clear()
        self._ended.clear()
        self._tombstones.clear()
        self._known.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError("The store is closed: the proxy is shutting down.")

    def _find(self, key: CopyKey) -> _Copy | None:
        self._check_open()
        return self._open.get(key) or self._ended.get(key)

    def _writable(self, key: CopyKey) -> _Copy:
        self._check_open()
        copy = self._open.get(key)
        if copy is None:
            what = "has ended" if key in self._ended else "is not there"
            raise CopyLostError(
                f"The copy of {key.response_id} {what}: its writer must stop writing."
            )
        return copy

    def _grow(self, key: CopyKey, copy: _Copy, added: int, snapshot: bytes | None) -> None:
        """Find room for new blocks and a new snapshot, or drop the copy and say so."""
        if snapshot is not None:
            added += len(snapshot) - len(copy.snapshot)
        try:
            self._make_room(copy.size, added)
        except StoreFullError:
            self._remove(key, Gone.DROPPED)
            raise
        if snapshot is not None:
            copy.snapshot = snapshot
        copy.size += added
        self._size += added

    def _make_room(self, held: int, added: int) -> None:
        """Evict ended copies until ``added`` bytes fit to a copy that holds ``held`` of them."""
        check_copy_room(held + added, self._limits.max_copy_bytes)
        check_store_room(self._size + added, self._max_bytes, ended_size=self._ended_size)
        missing = self._size + added - self._max_bytes
        while missing > 0:
            oldest, copy = next(iter(self._ended.items()))
            missing -= copy.size
            self._remove(oldest, Gone.EVICTED)

    def _remove(self, key: CopyKey, reason: Gone) -> Tombstone:
        copy = self._open.pop(key, None)
        if copy is None:
            copy = self._ended.pop(key)
            self._ended_size -= copy.size
        self._size -= copy.size
        stone = self._tombstones[key] = Tombstone(key, reason, self._clock())
        while len(self._tombstones) > self._limits.max_tombstones:
            self._forget(next(iter(self._tombstones)))
        return stone

    def _forget(self, key: CopyKey) -> None:
        """Let go of a tombstone, and with it of the last that is known of its key."""
        del self._tombstones[key]
        self._known[key.response_id] -= 1
        if not self._known[key.response_id]:
            del self._known[key.response_id]
