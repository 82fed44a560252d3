"""Read a copy: what was stored, what is in memory, then what comes, without gap or repeat."""

from __future__ import annotations

from contextlib import aclosing
from enum import StrEnum
from typing import TYPE_CHECKING

from proxy.background.feed import Place, State

if TYPE_CHECKING:
    from proxy.background.feed import Feed, Sink
    from proxy.store import CopyKey, Store

__all__ = ["Ending", "follow", "replay"]


class Ending(StrEnum):
    """How following a copy ended."""

    WHOLE = "whole"
    ELSEWHERE = "elsewhere"  # the run goes on without us: resume with the cursor
    LOST = "lost"  # the copy is gone and what comes next is not known


_ENDINGS = {State.ENDED: Ending.WHOLE, State.ELSEWHERE: Ending.ELSEWHERE, State.GONE: Ending.LOST}


async def follow(run: Feed, store: Store, after: int | Place, sink: Sink) -> Ending | Place:
    """Write a run's blocks behind the number or place ``after`` into ``sink`` until the run ends.

    A follower that is too slow for the run reads from the store and never slows it.  Returns the
    place to go on from if another replica has taken the run over.
    """
    place = after if isinstance(after, Place) else Place(None, after)
    index = start = await run.index_of(place)
    while True:
        await sink.drain()
        if index < run.first:
            read = await _read_stored(run, store, index, sink)
            if read == index:
                return Ending.LOST
            index = read
        elif run.state is State.MOVED:
            return run.place(index) if index > start else place
        elif index < run.total:
            data, index = run.read(index)
            sink.write(data)
        elif run.state is State.OPEN:
            index = await run.live(index, sink)
        else:
            return _ENDINGS[run.state]


async def replay(store: Store, key: CopyKey, index: int, blocks: int, sink: Sink) -> Ending:
    """Write the stored blocks of an ended copy from ``index`` on; it has so many ``blocks``."""
    async with aclosing(store.read(key, index)) as batches:
        async for batch in batches:
            await sink.drain()
            sink.write(b"".join(block.raw for block in batch))
            index += len(batch)
    return Ending.WHOLE if index >= blocks else Ending.LOST


async def _read_stored(run: Feed, store: Store, index: int, sink: Sink) -> int:
    """Write what only the store has; return the index behind it."""
    if run.key is None or run.copy_lost:
        return index
    async with aclosing(store.read(run.key, index)) as batches:
        async for batch in batches:
            await sink.drain()
            # The store may be ahead of what the run knows of itself when another replica makes it.
            some = batch[: max(0, run.total - index)]
            sink.write(b"".join(block.raw for block in some))
            index += len(some)
            if index >= run.first:
                break
    return index
