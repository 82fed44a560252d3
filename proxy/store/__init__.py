"""Copies of background responses: the contract that every store keeps.

A *copy* is what a background response has sent, block by block, under a key of
(owner, response id).  A store only keeps and hands out; who may read, what a block means
and when a run has ended is decided in ``proxy.background``.

Why this shape: a batch names the number it follows (``after``), so a store whose writer
lost its place refuses the batch instead of keeping a copy with a hole in it.  A copy is
kept whole or not at all: what cannot be kept is dropped as a whole and leaves a tombstone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

__all__ = [
    "Block",
    "CopyInfo",
    "CopyKey",
    "CopyLostError",
    "Gone",
    "Limits",
    "Store",
    "StoreError",
    "StoreFullError",
    "StoreUnavailableError",
    "Tombstone",
]


class StoreError(Exception):
    """What went wrong with a store; its subclasses say what a caller can do.

    Raised as it stands when a store cannot be opened: the setting or the file must change.
    """


class StoreUnavailableError(StoreError):
    """The store does not answer (disk error, server away, closed); later calls may work again.

    A copy whose ``append`` or ``end`` met this error is dropped as soon as the store can
    write again, so its writer must stop writing: nothing is ever kept with a hole in it.
    """


class StoreFullError(StoreError):
    """The copy, or all copies together, would pass their limit; the copy is not kept."""


class CopyLostError(StoreError):
    """The copy is gone, ended, or does not end at ``after``: this writer must stop writing."""


class Gone(StrEnum):
    """Why a copy is no longer there."""

    DELETED = "deleted"
    EXPIRED = "expired"
    EVICTED = "evicted"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class CopyKey:
    """What a copy is found by: the owner's keyed hash (hex) and the response id."""

    owner: str
    response_id: str


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One whole block of the event stream as it was sent: its bytes and its number.

    A block without a ``sequence_number`` of its own (a comment, ``[DONE]``) carries its
    predecessor's, so several blocks may share a number; -1 stands before the first.
    Numbers never step back within a copy: the writer sees to it.

    Why a msgspec struct: one is made per event, live and on replay, and this costs a fifth
    of a frozen dataclass.
    """

    number: int
    raw: bytes


@dataclass(frozen=True, slots=True)
class CopyInfo:
    """What is known of a copy without its blocks.

    ``meta`` is set at creation and never read by a store.  ``snapshot`` is the response
    object (JSON bytes) as of now.  Times are seconds since the epoch; ``ended_at`` is None
    while the run goes on.  ``last_number`` is -1 while nothing was stored; ``size`` counts
    what the limits count: the bytes of all blocks, of ``meta`` and of ``snapshot``.
    """

    key: CopyKey
    meta: bytes
    snapshot: bytes
    created_at: float
    ended_at: float | None
    last_number: int
    blocks: int
    size: int


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What is left of a copy that is gone: no content, only whose it was and why it went."""

    key: CopyKey
    reason: Gone
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a store keeps and for how long; sizes count blocks, meta and snapshot.

    When room is needed, whole ended copies go, the one that ended first before the others
    (``EVICTED``); if all of them were not enough, none goes and the copy being written is
    not kept.  Open copies are never evicted and never expire.
    """

    copy_ttl_s: float = 3_600.0
    """From the copy's end to its expiry."""
    tombstone_ttl_s: float = 86_400.0
    max_tombstones: int = 20_000
    """Beyond it the oldest tombstones go."""
    max_copy_bytes: int = 64 * 1024 * 1024
    max_store_bytes: int | None = None
    """None is the store's own default: 1 GiB, in memory 256 MiB."""


class Store(Protocol):
    """Where copies are kept.  All methods may raise ``StoreUnavailableError``.

    Batches for one key come from one writer, in order.  Readers never hold a writer up.
    A caller that is cancelled while it waits leaves open whether its call took effect.
    """

    async def create(self, key: CopyKey, *, meta: bytes, snapshot: bytes) -> CopyInfo | None:
        """Make an empty, open copy and return None, or return the one that is already there.

        A tombstone of the same key is removed.  Raises ``StoreFullError`` if no room can be
        made; nothing is made and nothing evicted then.
        """

    async def append(
        self, key: CopyKey, after: int, blocks: Sequence[Block], *, snapshot: bytes | None = None
    ) -> None:
        """Add blocks behind the block count ``after`` (how many blocks the copy holds now).

        ``snapshot`` replaces the response object if given.  Returns when the batch will
        survive a crash of the process.  Raises ``CopyLostError`` if the copy is not there,
        has ended or does not hold exactly ``after`` blocks, and ``StoreFullError`` after
        having dropped the copy (tombstone ``DROPPED``).
        """

    async def end(self, key: CopyKey, *, snapshot: bytes | None = None) -> None:
        """Mark the copy as ended now; ending it twice is harmless, the first end stands.

        Raises ``CopyLostError`` if the copy is not there, and ``StoreFullError`` after having
        dropped it because ``snapshot`` passes a limit.
        """

    async def get(self, key: CopyKey) -> CopyInfo | Tombstone | None:
        """Tell what is known of a key; None for one that was never here."""

    async def known(self, response_id: str) -> bool:
        """Tell whether any owner has a copy, or a tombstone of one, under this response id."""

    def read(self, key: CopyKey, start: int = 0) -> AsyncGenerator[Sequence[Block], None]:
        """Yield the stored blocks from the block index ``start`` on, in batches.

        Goes to the copy's end as it was when the first batch was asked for.  Each batch is a
        short read of its own (at most 1 MiB or one block), so a slow reader holds no snapshot
        open.  Ends silently if the copy is not there or goes away meanwhile; ask ``get``.
        """

    async def index_after(self, key: CopyKey, number: int) -> int:
        """Tell the index of the first block whose number is greater than ``number``.

        That is the block count if there is none, and 0 if the copy is not there.
        """

    async def drop(self, key: CopyKey, reason: Gone) -> bool:
        """Remove a copy whole, ended or not, and leave a tombstone; False if there was none.

        A tombstone that is already there keeps its reason.
        """

    async def open_copies(self) -> Sequence[CopyInfo]:
        """List the copies that have not ended, oldest first: what a crash left behind."""

    async def expire(self) -> Sequence[Tombstone]:
        """Remove what has outlived its time (copies and tombstones); tell which copies went."""

    async def size(self) -> int:
        """Tell the bytes of all copies together."""

    async def aclose(self) -> None:
        """Flush what is pending and let go of files and threads; harmless when repeated.

        Every later call raises ``StoreUnavailableError``.
        """
