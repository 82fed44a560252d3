"""One background response while it is made: its events, its copy, its followers."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING

from proxy.background.feed import Feed, State
from proxy.background.recorder import Recorder
from proxy.core.background import mark_background, sequence_number
from proxy.core.corrector import Corrector
from proxy.core.event import parse_event
from proxy.core.http_chunk import TAIL_BYTES
from proxy.core.json_edit import set_member
from proxy.core.outcome import Outcome, outcome_of
from proxy.core.output_items import OutputItems
from proxy.core.progress import Seen
from proxy.core.responses import read_payload
from proxy.store import Block, CopyLostError
from proxy.store.shared import LeaseLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.core.held_bytes import Share
    from proxy.store import CopyKey, Store, StoreError

__all__ = ["FlawedStreamError", "Run", "RunMode"]

GATHER_S = 0.2
"""How long events gather before they are stored, unless the store says otherwise.

A crash loses as much; four times as many writes would make an event cost a fifth more.
"""


class FlawedStreamError(CopyLostError):
    """Upstream's stream cannot be kept as it came."""


class RunMode(StrEnum):
    """Who makes the response go on without its client."""

    UPSTREAM = "upstream"
    PROXY = "proxy"


class Run(Feed):
    """The events of one run: published to followers at once, recorded behind them.

    ``created`` is done once the response has an id, for which ``on_created`` gives the copy's
    key, and ``created_response`` is the response object as it was then.  ``closed`` is set once
    the copy is safe.  ``on_dropped`` is told why a copy could not be kept.
    ``first_event_at`` is None for a run that is taken up again.
    """

    def __init__(
        self,
        mode: RunMode,
        *,
        store: Store,
        max_event_bytes: int,
        share: Share | None = None,
        on_dropped: Callable[[Run, Exception], None],
        meta: bytes,
        gather_s: Callable[[], float] = lambda: GATHER_S,
    ) -> None:
        super().__init__(store)
        self._gather_s = gather_s
        self.mode = mode
        self.meta = meta
        self.corrector = Corrector(max_event_bytes=max_event_bytes, share=share)
        self._loop = asyncio.get_running_loop()
        self.began_at = self._loop.time()
        self.first_event_at: float | None = None
        self._ended_as: Outcome | None = None  # where that was not upstream's word
        self.created: asyncio.Future[None] = self._loop.create_future()
        self.created_response = b"{}"
        self.closed = asyncio.Event()
        self._numbered = False
        self._items = OutputItems()
        self.on_created: Callable[[str], CopyKey] | None = None
        self._on_dropped = on_dropped
        self._recorder: Recorder | None = None
        self._recording: asyncio.Task[None] | None = None
        self._flaw: str | None = None  # why no copy can be kept

    # What comes from upstream.

    def take(self, chunk: bytes) -> None:
        """Take one chunk of upstream's event stream."""
        self._publish(self.corrector.feed_blocks(chunk))

    def take_http_chunk(self, http_chunk: bytes, now: float) -> int:
        """Take a read that is one whole HTTP chunk, as most are: the next of many deltas.

        ``now`` is the loop's time. Returns how many bytes of data it holds; 0 if it was not taken.
        """
        recorder = self._recorder
        if recorder is None:  # a stream that has not told its name is looked at more closely
            return 0
        size = self.corrector.take_http_chunk(http_chunk)
        if not size:
            return 0
        raw = http_chunk[-TAIL_BYTES - size : -TAIL_BYTES]
        number = self.corrector.last_sequence_number
        if (
            number is not None
            and number == self._number + 1
            and self._numbered
            and self.state is State.OPEN
            and not self.copy_lost
        ):
            block = Block(number, raw)
            self._number = number
            self._tail.append(block)
            self._tail_bytes += size
            self.total += 1
            if self._live:
                self._deliver_http_chunk(http_chunk, size, now)
            recorder.add_one(block, size)
        else:
            self._publish([Seen(raw, number, plain=True)])
        return size

    def finish(self) -> None:
        """Take the end of upstream's body: a terminal event without its blank line is completed."""
        self._publish_one(self.corrector.finish())

    def fail(self, message: str, ended_as: Outcome = Outcome.LOST) -> None:
        """End the run with ``response.failed``, unless it has ended."""
        if not self.corrector.ended:
            self._ended_as = ended_as
        self._publish_one(self.corrector.fail(message))

    def cancel(self) -> None:
        """End the run as cancelled, unless it has ended."""
        self._publish_one(self.corrector.cancel())

    def resume(self, key: CopyKey, *, snapshot: bytes, last_number: int, blocks: int) -> None:
        """Go on with a copy that the store holds already."""
        self.key = key
        self.corrector.resume(snapshot, last_number)
        self._number, self._numbered = last_number, last_number >= 0
        self.first = self.total = self._stored = blocks
        self.created.set_result(None)
        self._start_recording(None)

    async def close(self, state: State) -> None:
        """Let the followers go, store what is pending, and return when the copy is safe."""
        if self.state is State.OPEN:
            self.state = state
        self.corrector.close()
        self._wake_all()
        if self._recorder is not None and self._recording is not None:
            self._recorder.close(ended=state is State.ENDED)
            await self._recording
        self.closed.set()

    def move(self) -> None:
        """Leave the run to another replica, which has taken it over; its copy is not ours."""
        if self.state is State.OPEN:
            self.state = State.MOVED
            self._wake_all()
            if self._recorder is not None:
                self._recorder.give_up(LeaseLostError("Another replica has taken the run over."))

    async def kept(self) -> StoreError | None:
        """Wait until there is a copy; return what went wrong if there will be none."""
        if self._recorder is None:
            return None
        return await asyncio.shield(self._recorder.begun)

    # What followers read.

    @property
    def snapshot(self) -> bytes | None:
        """The response object as of now."""
        response = self.corrector.response
        if response is None:
            return None
        if self.mode is RunMode.PROXY:
            response = set_member(response, "background", b"true", first=True)
        if self.corrector.ended:
            response = self._items.fill(response)
        return response

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended; None while it has not."""
        return self._ended_as or outcome_of(self.corrector.terminal)

    @property
    def nameless_bytes(self) -> int:
        """What is held of a stream that has not told its response's id yet."""
        return self._tail_bytes if self.key is None else 0

    @property
    def holds_copy(self) -> bool:
        """Whether the store has, or had, a copy that this run wrote."""
        return self._recorder is not None and self._recorder.holds

    # Inside.

    def _publish_one(self, block: bytes) -> None:
        if block:
            self._publish([Seen(block, sequence_number(block))])

    def _publish(self, seen: list[Seen]) -> None:
        """Hand blocks to all live followers and to the recorder."""
        if not seen or self.state is State.MOVED:  # its followers go on with another's copy
            return
        blocks = [Block(self._next_number(one.number), self._kept(one)) for one in seen]
        data = blocks[0].raw if len(blocks) == 1 else b"".join([block.raw for block in blocks])
        self._tail += blocks
        self._tail_bytes += len(data)
        self.total += len(blocks)
        if self._live:
            self._deliver(data, len(blocks))
        if self.copy_lost:
            self._forget_stored(self.total)
        else:
            self._record(blocks, len(data), plain=all(one.plain for one in seen))

    def _kept(self, seen: Seen) -> bytes:
        """Return a block as it is kept and sent."""
        raw = seen.raw
        if not seen.plain:
            if self.mode is RunMode.PROXY:
                raw = mark_background(raw)
            self._items.take(raw)
        return raw

    def _next_number(self, number: int | None) -> int:
        """Return a block's number, its predecessor's if it has none; see that none is missing."""
        if number is None:
            return self._number
        if self._numbered and number != self._number + 1:
            self._flaw = f"upstream's numbers go from {self._number} to {number}"
        self._numbered = True
        self._number = max(number, self._number)
        return self._number

    def _record(self, blocks: list[Block], size: int, *, plain: bool) -> None:
        """Hand blocks to the recorder, which begins once the response has told its id."""
        snapshot = None
        if not plain:
            if any(b'"response"' in block.raw for block in blocks):
                snapshot = self.snapshot
            response_id = self.corrector.response_id
            if self.key is None and response_id is not None and self.on_created is not None:
                self.first_event_at = self._loop.time()
                self.key = self.on_created(response_id)
                self.created_response = _response_of(blocks) or b"{}"
                self._start_recording((self.meta, snapshot or b"{}"))
                if not self.created.done():
                    self.created.set_result(None)
                blocks, size, snapshot = list(self._tail), self._tail_bytes, None
            if self.corrector.overlong_events:
                self._flaw = "an event was longer than may be held"
        if self._recorder is not None:
            if self._flaw is not None:
                self._recorder.give_up(FlawedStreamError(self._flaw))
            self._recorder.add(blocks, size, snapshot)

    def _start_recording(self, create: tuple[bytes, bytes] | None) -> None:
        if self.key is None:
            raise RuntimeError("a run is recorded once it has an id")
        self._recorder = Recorder(
            self._store,
            self.key,
            on_stored=self._forget_stored,
            on_lost=self._lose_copy,
            gather_s=self._gather_s,
        )
        self._recording = asyncio.create_task(  # noqa: TID251 - awaited by close
            self._recorder.run(create=create, stored=self._stored)
        )

    def _lose_copy(self, error: Exception) -> None:
        """Go on without a copy: what followers have not read yet is kept within the tail's size."""
        if self.state is State.MOVED:
            return
        self.copy_lost = True
        self._on_dropped(self, error)
        self._forget_stored(self.total)


def _response_of(blocks: list[Block]) -> bytes | None:
    """Return the first response object that the blocks hold."""
    for block in blocks:
        payload = read_payload(parse_event(block.raw).payload())
        if payload is not None and payload.has_response:
            return payload.response()
    return None
