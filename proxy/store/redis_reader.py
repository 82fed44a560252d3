"""What is read of copies in Redis, by whichever process."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from proxy.store import CopyInfo, StoreUnavailableError
from proxy.store.redis_keys import from_member, to_member
from proxy.store.redis_queue import ScriptQueue
from proxy.store.redis_replies import read_found
from proxy.store.rows import decode_row

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from proxy.store import Block, CopyKey, Gone, Limits, Tombstone
    from proxy.store.redis_keys import Keys
    from proxy.store.redis_link import Call, Link

__all__ = ["AT_ONCE", "Arg", "RedisReader"]

AT_ONCE = 256
"""So many copies are worked on in one round trip."""

_READ_BYTES = 1024 * 1024

Arg = bytes | str | int | float


class RedisReader:
    """Reads copies, and makes the calls that the scripts of a copy are run with.

    ``clock`` is for tests; without it the server's own clock counts, for every process alike.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        limits: Limits,
        lease_s: float,
        clock: Callable[[], float] | None,
    ) -> None:
        self._link = link
        self._keys = keys
        self._limits = limits
        self._lease_s = lease_s
        self._clock = clock
        # Many may ask at once, after a restart for example.
        self._lookups = ScriptQueue(link)

    @property
    def up(self) -> bool:
        """Whether the server has answered all that it was asked, for a while.

        One that is out of memory answers reads between the writes that it refuses.
        """
        since, now = self._link.up_since, asyncio.get_running_loop().time()
        return self._link.up and (since is None or now - since >= self._lease_s / 2)

    async def get(self, key: CopyKey) -> CopyInfo | Tombstone | None:
        """Tell what is known of a key."""
        return read_found(key, await self._look_up("get", to_member(key)))

    async def known(self, response_id: str) -> bool:
        """Tell whether any owner has or had a copy under this id."""
        return bool(await self._link.ask("HEXISTS", self._keys.ids, response_id))

    async def read(self, key: CopyKey, start: int = 0) -> AsyncGenerator[Sequence[Block], None]:
        """Yield the blocks from ``start`` on, in batches of at most 1 MiB or one block."""
        generation, end = b"", start
        while True:
            answer = await self._link.run(
                *self._call("read", to_member(key), generation, start, _READ_BYTES)
            )
            if not answer:
                return
            if not generation:
                generation, end = answer[0], int(answer[1])
            if start >= end:
                return
            first = int(answer[2])
            blocks = [block for row in answer[3:] for block in decode_row(row)]
            batch = blocks[start - first : end - first]
            start += len(batch)
            yield batch

    async def index_after(self, key: CopyKey, number: int) -> int:
        """Tell the index of the first block with a greater number."""
        answer = await self._look_up("index", to_member(key), number)
        if not answer:
            return 0
        row = decode_row(answer[1]) if len(answer) > 1 else []
        return int(answer[0]) + bisect_right(row, number, key=lambda block: block.number)

    async def open_copies(self) -> Sequence[CopyInfo]:
        """List the copies that have not ended, whoever writes them."""
        return await self._infos(await self._link.ask("ZRANGE", self._keys.open, 0, -1))

    async def size(self) -> int:
        """Tell the bytes of all copies together."""
        return int(await self._link.ask("HGET", self._keys.totals, "size") or 0)

    async def orphans(self) -> Sequence[CopyKey]:
        """List some open copies whose lease has run out while the server was there."""
        loop = asyncio.get_running_loop()
        since = self._link.up_since
        if since is not None and loop.time() - since >= self._lease_s:
            _, *late = await self._late(self._keys.open, 0)
        else:  # their writers had no chance to renew: only what was given back
            late = await self._link.ask(
                "ZRANGEBYSCORE", self._keys.open, "-inf", 0, "LIMIT", 0, AT_ONCE
            )
        return [from_member(member) for member in late]

    # Inside.

    def _now(self) -> float | str:
        return "" if self._clock is None else self._clock()

    def _call(self, script: str, member: bytes, *args: Arg) -> Call:
        _, _, response_id = member.partition(b":")
        head = member, response_id, self._limits.max_tombstones, self._now()
        return script, self._keys.of(member), (*head, *args)

    def _drop_call(self, member: bytes, reason: Gone, token: str, *, ended_by: Arg = "") -> Call:
        return self._call("drop", member, reason.value, token, ended_by)

    async def _look_up(self, script: str, member: bytes, *args: Arg) -> Any:
        return await self._lookups.run(self._call(script, member, *args))

    async def _late(self, keys: bytes, past_s: float) -> list[bytes]:
        late: list[bytes] = await self._link.run("late", [keys], [self._now(), past_s])
        return late

    async def _infos(self, members: Sequence[bytes]) -> list[CopyInfo]:
        """Get the open copies among some, oldest first."""
        infos = []
        for start in range(0, len(members), AT_ONCE):
            some = members[start : start + AT_ONCE]
            answers = await self._link.run_all([self._call("get", member) for member in some])
            for member, answer in zip(some, answers, strict=True):
                if isinstance(answer, StoreUnavailableError):
                    raise answer
                found = read_found(from_member(member), answer)
                if isinstance(found, CopyInfo) and found.ended_at is None:
                    infos.append(found)
        return sorted(infos, key=lambda info: info.created_at)
