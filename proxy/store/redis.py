"""Copies in Redis or Valkey, one primary: for several proxies, which keep nothing of their own."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from proxy.store import CopyInfo, Gone, Limits, StoreFullError, StoreUnavailableError, Tombstone
from proxy.store.redis_keys import Keys, from_member, to_member
from proxy.store.redis_leases import Leases
from proxy.store.redis_link import Link
from proxy.store.redis_queue import ScriptQueue
from proxy.store.redis_reader import AT_ONCE, Arg, RedisReader
from proxy.store.redis_replies import full, lost, read_info
from proxy.store.redis_tail import Tail
from proxy.store.rows import encode_row, rows
from proxy.store.shared import DEFAULT_MAX_BYTES, Claimed, Taken

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.store import Block, CopyKey
    from proxy.store.shared import Listener, Watcher

__all__ = ["RedisStore"]

_GATHER_S = 0.010
_GATHER_AT_MOST_S = 0.050
_GATHER_PER_RUN_S = 0.000_5
"""An append costs a tenth of a millisecond: with many runs each sends fewer and larger ones."""

_PATIENCE_S = 30.0
"""How long a batch waits for a server that is away, and a follower for news of its copy."""

_TRIES_FOR_ROOM = 100
_KEYS_OUTLIVE_S = 60.0
"""The server removes an ended copy's keys so long after a proxy should have removed them."""


class RedisStore(RedisReader):
    """A store on the server at ``url``, shared by all processes that name the same ``prefix``.

    ``clock`` is for tests; without it the server's own clock counts, for every process alike.
    """

    def __init__(
        self,
        url: str,
        limits: Limits | None = None,
        *,
        prefix: str = "lastword:",
        lease_s: float = 10.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(Link(url), Keys(prefix), limits or Limits(), lease_s, clock)
        given = self._limits.max_store_bytes
        self._max_bytes = DEFAULT_MAX_BYTES if given is None else given
        self._writer = ScriptQueue(self._link, patience_s=_PATIENCE_S)
        self._leases = Leases(
            self._link, self._keys, lease_s=lease_s, now=self._now, drop_call=self._drop_call
        )
        self._tail: Tail | None = None
        self._batches = count()
        self._closing: asyncio.Task[None] | None = None

    async def start(self, listener: Listener) -> None:
        """Check the server, begin to keep leases and to hear news."""
        await self._link.check()
        self._leases.on_lost = listener.lease_lost
        self._leases.start()
        self._tail = Tail(
            self._link,
            self._keys,
            listener,
            look_s=self._lease_s / 3,
            patience_s=_PATIENCE_S,
            look_call=lambda member: self._call("look", member),
        )
        self._tail.start()

    # Writing.

    async def create(self, key: CopyKey, *, meta: bytes, snapshot: bytes) -> CopyInfo | None:
        """Make an empty, open copy, or return the one that is there."""
        member = to_member(key)
        token = self._leases.new_token()
        args = token, meta, snapshot, self._lease_s, self._limits.max_copy_bytes, self._max_bytes
        answer = await self._write("create", member, args)
        if answer[0] == b"there":
            return read_info(key, answer[1])
        self._leases.hold(member, token)
        return None

    async def append(
        self, key: CopyKey, after: int, blocks: Sequence[Block], *, snapshot: bytes | None = None
    ) -> None:
        """Add blocks behind the ``after`` blocks that the copy holds.

        While the server is away this waits for it a while; the copy is not kept if it stays away.
        """
        member = to_member(key)
        parts: list[Arg] = []
        size = 0
        for row, row_size in rows(blocks):
            parts += (len(row), row[-1].number, encode_row(row))
            size += row_size
        await self._write_own(
            "append",
            member,
            next(self._batches),
            after,
            size,
            *_given(snapshot),
            self._limits.max_copy_bytes,
            self._max_bytes,
            *parts,
            size=size,
        )

    async def end(self, key: CopyKey, *, snapshot: bytes | None = None) -> None:
        """Mark the copy as ended now; the first end stands."""
        member = to_member(key)
        await self._write_own(
            "end",
            member,
            *_given(snapshot),
            self._limits.max_copy_bytes,
            self._max_bytes,
            int((self._limits.copy_ttl_s + _KEYS_OUTLIVE_S) * 1000),
        )
        self._leases.let_go(member)

    async def drop(self, key: CopyKey, reason: Gone) -> bool:
        """Remove a copy whole and leave a tombstone; a writer drops only what is still its own."""
        member = to_member(key)
        token = ""
        if reason is Gone.DROPPED:
            token = self._leases.token(member)
            self._leases.let_go(member)
        answer = await self._writer.run(self._drop_call(member, reason, token))
        return bool(answer[0])

    # Going away.

    async def expire(self) -> Sequence[Tombstone]:
        """Remove what has outlived its time, some at a time; every process may do it."""
        gone: list[Tombstone] = []
        late = [b""] * AT_ONCE
        while len(late) >= AT_ONCE:
            over, *late = await self._late(self._keys.ended, self._limits.copy_ttl_s)
            calls = [self._drop_call(m, Gone.EXPIRED, "", ended_by=over) for m in late]
            for member, answer in zip(late, await self._link.run_all(calls), strict=True):
                if isinstance(answer, StoreUnavailableError):
                    raise answer
                if answer[0]:
                    gone.append(Tombstone(from_member(member), Gone.EXPIRED, float(answer[1])))
        forgotten = AT_ONCE
        while forgotten >= AT_ONCE:
            (forgotten,) = await self._look_up("stones", b"", self._limits.tombstone_ttl_s)
        return gone

    async def aclose(self) -> None:
        """Send what waits, give the leases back, let go of the server."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())  # noqa: TID251 - awaited here
        await asyncio.shield(self._closing)

    # Among processes.

    @property
    def gather_s(self) -> float:
        """How long a writer lets events gather: 10 ms, with more than 20 open copies up to 50."""
        return min(max(_GATHER_S, self._leases.held * _GATHER_PER_RUN_S), _GATHER_AT_MOST_S)

    @property
    def lease_overdue(self) -> bool:
        """Whether another process may have taken our leases, since this one stood still."""
        return self._leases.overdue

    async def renew_leases(self) -> None:
        """Renew the leases now, so that those which are lost are told of."""
        await self._leases.renew()

    async def claim(self, key: CopyKey, digest: str) -> Claimed | None:
        """Claim a key before asking for what the copy will hold; None if nobody was before us."""
        member = to_member(key)
        token = self._leases.new_token()
        args = token, digest, int(self._lease_s * 1000)
        answer = await self._writer.run(self._call("claim", member, *args))
        if answer[0] == b"mine":
            self._leases.claim(member, token)
            return None
        return Claimed(answer[1].decode() if answer[0] == b"claimed" else None)

    async def unclaim(self, key: CopyKey) -> None:
        """Let go of a claim that no copy came of."""
        member = to_member(key)
        token = self._leases.let_go_of_claim(member)
        if token is not None:
            await self._writer.run(("unclaim", [self._keys.claim(member)], [token]))

    async def take(self, key: CopyKey) -> Taken | None:
        """Become the writer of an open copy; None if another process writes it or it is none."""
        member = to_member(key)
        token = self._leases.new_token()
        answer = await self._writer.run(self._call("take", member, token, self._lease_s))
        if not answer:
            return None
        self._leases.hold(member, token)
        return Taken(read_info(key, answer[0]), bool(answer[1]))

    async def release(self, key: CopyKey) -> None:
        """Give an open copy back for others to take."""
        member = to_member(key)
        token = self._leases.let_go(member)
        if token is not None:
            await self._writer.run(self._call("release", member, token))

    async def ask_cancel(self, key: CopyKey) -> bool:
        """Ask the writer of an open copy to cancel its run; False if it is not open."""
        (asked,) = await self._writer.run(self._call("cancel", to_member(key)))
        return bool(asked)

    def watch(self, key: CopyKey, blocks: int, watcher: Watcher) -> None:
        """Tell ``watcher`` what comes behind the first ``blocks`` blocks, until ``unwatch``."""
        if self._tail is None:
            raise RuntimeError("a store is started before copies are watched")
        self._tail.watch(to_member(key), blocks, watcher)

    def unwatch(self, key: CopyKey) -> None:
        """Tell no more of a copy."""
        if self._tail is not None:
            self._tail.unwatch(to_member(key))

    # Inside.

    async def _write(
        self,
        script: str,
        member: bytes,
        args: Sequence[Arg],
        *,
        size: int = 0,
        waits: bool = False,
    ) -> Any:
        """Run a script that may need room; raises ``StoreFullError`` if there is none."""
        for _ in range(_TRIES_FOR_ROOM):
            call = self._call(script, member, *args)
            answer = await self._writer.run(call, size=size, waits=waits)
            if answer[0] != b"evict":
                break
            for oldest in answer[1:]:
                await self._writer.run(self._drop_call(oldest, Gone.EVICTED, "", ended_by="1e300"))
        else:
            raise StoreFullError("Other copies take the room as fast as it is made.")
        if answer[0] in (b"copy_full", b"store_full"):
            raise full(answer, self._limits.max_copy_bytes, self._max_bytes)
        return answer

    async def _write_own(self, script: str, member: bytes, *args: Arg, size: int = 0) -> None:
        """Run a script that only the holder of the lease may run."""
        token = self._leases.token(member)
        try:
            answer = await self._write(script, member, (token, *args), size=size, waits=True)
        except (StoreUnavailableError, StoreFullError):
            self._leases.doom(member)  # it may be there still, and must not be taken over torn
            raise
        if answer[0] == b"done":
            return
        if answer[0] == b"taken":
            self._leases.lost(member, token)
        elif answer[0] != b"misplaced":
            self._leases.let_go(member)
        raise lost(from_member(member), answer)

    async def _close(self) -> None:
        await self._writer.aclose()
        await self._lookups.aclose()
        left = await self._leases.aclose()
        with suppress(StoreUnavailableError):
            for start in range(0, len(left), AT_ONCE):
                some = left[start : start + AT_ONCE]
                await self._link.run_all([self._call("release", *lease) for lease in some])
        if self._tail is not None:
            await self._tail.aclose()
        await self._link.aclose()


def _given(snapshot: bytes | None) -> tuple[Arg, Arg]:
    return ("", "") if snapshot is None else ("1", snapshot)
