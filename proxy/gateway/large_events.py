"""Large events are looked at in a thread: the other streams go on meanwhile.

A look at 16 MB takes tens of milliseconds, in which the event loop would serve nobody.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.core.event_stream import LARGE_BYTES, Fragment
from proxy.core.look import look

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.core.corrector import Corrector
    from proxy.core.held_bytes import Share
    from proxy.core.look import Look
    from proxy.core.progress import Seen

__all__ = ["LargeEvents"]


class LargeEvents:
    """Take a stream's chunks block by block, large ones by way of a thread.

    ``deliver`` gets what the corrector makes of them, in order.  While ``looking``, upstream must
    be held back, for which ``hold`` and ``go_on`` are called; what comes all the same waits, and is
    given to ``again`` after the look.  ``give_up`` is called if delivering fails, which ``settled``
    raises then.  ``share`` accounts for what is looked at.
    """

    def __init__(
        self,
        corrector: Corrector,
        *,
        deliver: Callable[[list[Seen]], None],
        again: Callable[[bytes], None],
        hold: Callable[[], None],
        go_on: Callable[[], None],
        give_up: Callable[[], None],
        share: Share,
    ) -> None:
        self._corrector = corrector
        self._deliver = deliver
        self._again = again
        self._hold = hold
        self._go_on = go_on
        self._give_up = give_up
        self._share = share
        self._task: asyncio.Task[None] | None = None
        self._waiting: list[bytes] = []

    @property
    def looking(self) -> bool:
        """Whether a look is going on."""
        return self._task is not None

    def take(self, chunk: bytes) -> None:
        """Take a chunk; what it completes is delivered at once, or after the look."""
        if self._task is not None:
            self._waiting.append(chunk)
            self._share.add(len(chunk))
            self._hold()
            return
        corrector = self._corrector
        blocks = corrector.cut(chunk)
        if not any(_is_large(block) for block in blocks):
            self._deliver(corrector.take_blocks(blocks))
            return
        self._share.add(sum(map(len, blocks)))
        self._hold()
        self._task = asyncio.create_task(self._look(blocks))  # noqa: TID251 - see settled

    async def settled(self) -> None:
        """Wait until nothing is being looked at; raises what delivering has raised."""
        while self._task is not None:
            await self._task

    def close(self) -> None:
        """Give up what is being looked at, and give the share back."""
        if self._task is not None:
            self._task.cancel()
        self._waiting.clear()
        self._share.close()

    async def _look(self, blocks: list[bytes | bytearray]) -> None:
        try:
            looks = await asyncio.to_thread(_look_at_large, blocks)
            self._deliver(self._corrector.take_blocks(blocks, looks))
        except Exception:
            self._give_up()
            raise
        self._task = None
        self._share.close()
        waiting = b"".join(self._waiting)
        self._waiting.clear()
        self._go_on()
        if waiting:
            self._again(waiting)  # it may hold upstream back again


def _is_large(block: bytes | bytearray) -> bool:
    return len(block) >= LARGE_BYTES and not isinstance(block, Fragment)


def _look_at_large(blocks: list[bytes | bytearray]) -> list[Look | None]:
    return [look(block) if _is_large(block) else None for block in blocks]
