"""A run that another replica makes, as its followers here read it: out of the shared store."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from proxy.background.feed import Feed, State
from proxy.background.meta import read_meta
from proxy.background.recovery import is_interruption
from proxy.core.event import parse_event
from proxy.core.outcome import Outcome, outcome_of
from proxy.core.responses import judge, may_be_terminal, read_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from proxy.store import Block, CopyInfo
    from proxy.store.shared import SharedStore
    from proxy.upstream.headers import Pairs

__all__ = ["RemoteRun"]


class RemoteRun(Feed):
    """What this process knows of a run elsewhere, for as long as somebody here follows it.

    ``headers`` are those of the last follower: with them the run can be taken up if its replica is
    lost.  ``closed`` is set when the copy has ended, is gone, or is out of reach.
    """

    def __init__(
        self,
        info: CopyInfo,
        store: SharedStore,
        headers: Pairs,
        on_left: Callable[[RemoteRun], None],
    ) -> None:
        super().__init__(store, info.key)
        self.info = info
        self.mode = read_meta(info.meta).run_mode
        self.meta = info.meta
        self.headers = headers
        self.closed = asyncio.Event()
        self.first = self.total = self._stored = info.blocks
        self._number = info.last_number
        self._shared = store
        self._on_left = on_left
        self._followers = 0
        self._last = b""  # the terminal event, once it has come
        # What a heartbeat asks: blocks come whole, and an earlier one may have had an id.
        self.between_events = True
        self.has_ids = True
        self.response_id: str | None = info.key.response_id

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Watch the copy while somebody follows."""
        if not self._followers:
            self._shared.watch(self.info.key, self.total, self)
        self._followers += 1
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers:
                self._shared.unwatch(self.info.key)
                self._on_left(self)

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended; None while that is not known."""
        return outcome_of(judge(self._last)) if self._last else None

    @property
    def ended(self) -> bool:
        """Whether nothing is to come any more."""
        return bool(self._last) or self.state is not State.OPEN

    async def index_after(self, number: int) -> int:
        """Tell the index of the first block behind the event of this number, or of the last one.

        A cursor may be ahead of what its replica had stored when it was lost.
        """
        index = await super().index_after(number)
        if self.state is State.ENDED and index >= self.total and self._was_interrupted():
            return self.total - 1
        return index

    def leave(self) -> None:
        """Let the followers go: the run goes on, and they resume elsewhere."""
        self._close(State.ELSEWHERE)

    # What the store tells.

    def grown(self, blocks: Sequence[Block]) -> None:
        """Hand blocks to all live followers."""
        raws = [block.raw for block in blocks]
        self._tail += blocks
        self._tail_bytes += sum(map(len, raws))
        self.total += len(blocks)
        self._number = blocks[-1].number
        self._last = next((r for r in raws if may_be_terminal(r) and judge(r)), self._last)
        if self._live:
            self._deliver(b"".join(raws), len(raws))
        self._forget_stored(self.total)

    def finished(self, blocks: int) -> None:  # noqa: ARG002 - all of them have come
        """Take that the copy is whole."""
        self._close(State.ENDED)

    def gone(self) -> None:
        """Take that the copy is gone."""
        self._close(State.GONE)

    def out_of_touch(self) -> None:
        """Take that the store is away; the followers may resume when it is back."""
        self._close(State.ELSEWHERE)

    # Inside.

    def _close(self, state: State) -> None:
        if self.state is State.OPEN:
            self.state = state
            self._wake_all()
            self.closed.set()

    def _was_interrupted(self) -> bool:
        payload = read_payload(parse_event(self._last).payload()) if self._last else None
        return bool(payload and payload.has_response and is_interruption(payload.response()))
