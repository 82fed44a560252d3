"""What a store offers whose copies several processes write and read: leases, claims, news.

Each open copy has one writer, which holds its lease.  A store renews the leases of its process
and refuses what comes from a writer whose lease another process has taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from proxy.store import CopyLostError, Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.store import Block, CopyInfo, CopyKey

__all__ = [
    "DEFAULT_MAX_BYTES",
    "Claimed",
    "LeaseLostError",
    "Listener",
    "SharedStore",
    "Taken",
    "Watcher",
]


DEFAULT_MAX_BYTES = 1024 * 1024 * 1024


class LeaseLostError(CopyLostError):
    """Another process writes this copy now: it is whole, and this writer must stop writing."""


@dataclass(frozen=True, slots=True)
class Taken:
    """An open copy that this process writes from now on; ``cancelled`` if someone asked for it."""

    info: CopyInfo
    cancelled: bool


@dataclass(frozen=True, slots=True)
class Claimed:
    """Another process makes a copy of this key.

    ``digest`` is what it was claimed with, None once the copy is there.
    """

    digest: str | None


class Listener(Protocol):
    """Hears what other processes did, on the event loop; no method may wait."""

    def lease_lost(self, key: CopyKey) -> None:
        """Another process has taken a copy that this one was writing."""

    def cancel_asked(self, key: CopyKey) -> None:
        """Somebody asks for an open copy's run to be cancelled, whoever writes it."""

    def orphaned(self) -> None:
        """Some copy has been given back: ``orphans`` may have it."""


class Watcher(Protocol):
    """Hears of one copy, on the event loop; no method may wait.  After an end nothing follows."""

    def grown(self, blocks: Sequence[Block]) -> None:
        """Take the next blocks, without gap or repeat."""

    def finished(self, blocks: int) -> None:
        """The copy ends with this block count; the last of them may be still to come."""

    def gone(self) -> None:
        """The copy is no longer there."""

    def out_of_touch(self) -> None:
        """The store has been away for so long that nothing more is to be expected."""


class SharedStore(Store, Protocol):
    """A store that several processes use at once."""

    @property
    def up(self) -> bool:
        """Whether the store answered when it was last asked."""

    @property
    def gather_s(self) -> float:
        """How long a writer should let events gather: followers elsewhere wait for them."""

    async def start(self, listener: Listener) -> None:
        """Begin to keep leases and to hear news.

        A store that is away is no reason to fail; raises ``StoreError`` if it will not do.
        """

    @property
    def lease_overdue(self) -> bool:
        """Whether another process may have taken our leases, since this one stood still.

        Not since the store is away: then nobody can, and trying to renew them is enough.
        """

    async def renew_leases(self) -> None:
        """Renew the leases now, so that those which are lost are told of.

        Raises ``StoreUnavailableError``.
        """

    async def claim(self, key: CopyKey, digest: str) -> Claimed | None:
        """Claim a key before asking for what the copy will hold; None if nobody was before us.

        A claim is renewed like a lease, ends with the copy's ``create``, and is not exclusive
        within this process.
        """

    async def unclaim(self, key: CopyKey) -> None:
        """Let go of a claim that no copy came of; harmless without one."""

    async def orphans(self) -> Sequence[CopyKey]:
        """List some open copies whose lease has run out.

        None while the store itself was away a lease's time ago: their writers could not renew.
        """

    async def take(self, key: CopyKey) -> Taken | None:
        """Become the writer of an open copy; None if another process writes it or it is none."""

    async def release(self, key: CopyKey) -> None:
        """Give an open copy back for others to take; harmless if it is not ours."""

    async def ask_cancel(self, key: CopyKey) -> bool:
        """Ask the writer of an open copy to cancel its run; False if it is not open."""

    def watch(self, key: CopyKey, blocks: int, watcher: Watcher) -> None:
        """Tell ``watcher`` what comes behind the first ``blocks`` blocks, until ``unwatch``.

        ``blocks`` is a count that ``get`` or ``take`` has told of this copy.
        """

    def unwatch(self, key: CopyKey) -> None:
        """Tell no more of a copy."""
