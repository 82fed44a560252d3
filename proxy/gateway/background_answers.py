"""Answers about background responses: their streams, their objects, why they cannot be had."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from proxy.background.feed import Place
from proxy.background.follower import Ending, follow, replay
from proxy.background.meta import is_object
from proxy.background.recovery import is_interruption
from proxy.background.remote import RemoteRun
from proxy.background.run import Run
from proxy.core.background import truth
from proxy.core.outcome import Outcome
from proxy.core.responses import read_payload
from proxy.errors import BadRequestError, RequestError
from proxy.gateway.heartbeat import Heartbeat
from proxy.store import CopyInfo, StoreError, Tombstone
from proxy.upstream.headers import response_headers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.background.runs import Runs
    from proxy.gateway.downstream import Downstream
    from proxy.gateway.record import Observer
    from proxy.settings import Settings
    from proxy.upstream.headers import Pairs

__all__ = [
    "ENDED",
    "FROM_THE_START",
    "StreamAnswers",
    "away",
    "cannot_cancel",
    "no_stream",
    "read_query",
    "status_of",
    "why_no_events",
]

FROM_THE_START = -2  # a comment before the first event has -1
ENDED = frozenset({"completed", "incomplete", "failed", "cancelled"})
_LARGEST_NUMBER = 2**63 - 1  # what SQLite takes
_EVENT_STREAM: Pairs = [(b"content-type", b"text/event-stream; charset=utf-8")]
_BAD_REQUEST = 400
_OK = 200


class StreamAnswers:
    """Streams of copies: followed while they are made, replayed when they have ended.

    ``followers`` is how many clients are being sent a copy's events.
    """

    def __init__(self, settings: Settings, runs: Runs, observer: Observer) -> None:
        self._settings = settings
        self._runs = runs
        self._store = runs.store
        self._observer = observer
        self.followers = 0

    async def follow(
        self,
        down: Downstream,
        run: Run | RemoteRun,
        after: int,
        headers: Pairs,
        *,
        head: Pairs | None = None,
    ) -> None:
        """Answer with a run's events behind the number ``after``, until it ends.

        ``headers`` are the request's as they go up, ``head`` those that upstream's stream came
        with.
        """
        record = down.record
        record.outcome = Outcome.CLIENT_GONE  # unless it stays to the end
        if head is None:
            self._observer.replayed("copy_live")
        elif isinstance(run, Run):
            record.first_event_at = run.first_event_at
        with self._following():
            ending, whole = await self._follow(down, run, Place(None, after), headers, head)
        outcome = _outcome(ending, whole)
        if isinstance(run, Run):
            record.note_stream(run.corrector, outcome)
        record.outcome = outcome
        self._end(down, ending)

    async def _follow(
        self,
        down: Downstream,
        run: Run | RemoteRun,
        place: Place,
        headers: Pairs,
        head: Pairs | None,
    ) -> tuple[Ending, Outcome | None]:
        """Follow a run wherever it goes on; return how that ended, and how the run did."""
        left: Ending | Place = place
        whole: Outcome | None = None
        try:
            while isinstance(left, Place):
                heartbeat = Heartbeat(
                    down.writer,
                    run if isinstance(run, RemoteRun) else run.corrector,
                    every_s=self._settings.heartbeat_s,
                    kind=self._settings.heartbeat_kind,
                )
                with heartbeat, run.followed():
                    if not down.writer.started:
                        await self._start_stream(down, head)
                    left = await follow(run, self._store, left, down.writer)
                whole = run.outcome
                if isinstance(left, Place) and run.key is not None:
                    found = await self._runs.rejoin(run.key, headers)
                    if isinstance(found, Tombstone) or found is None:
                        left = Ending.LOST
                    elif isinstance(found, CopyInfo):
                        left = await self._replay_rest(down, found, left)
                        whole = _outcome_of(found)
                    else:
                        run = found
        except StoreError:
            left = Ending.LOST
        return (left if isinstance(left, Ending) else Ending.LOST), whole

    async def replay(self, down: Downstream, info: CopyInfo, after: int) -> None:
        """Answer with the events of an ended copy behind the number ``after``."""
        index = await self._index_after(info, after)
        await self._start_stream(down, None)
        self._observer.replayed("copy_stored")
        down.record.outcome = Outcome.CLIENT_GONE  # unless it stays to the end
        with self._following():
            try:
                ending = await replay(self._store, info.key, index, info.blocks, down.writer)
            except StoreError:
                ending = Ending.LOST
        down.record.outcome = _outcome(ending, _outcome_of(info))
        self._end(down, ending)

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Count a follower while the block runs."""
        self.followers += 1
        try:
            yield
        finally:
            self.followers -= 1

    async def _replay_rest(self, down: Downstream, info: CopyInfo, place: Place) -> Ending:
        """Go on with a copy that another replica has ended."""
        index = place.index
        if index is None:
            index = await self._index_after(info, place.number)
        return await replay(self._store, info.key, index, info.blocks, down.writer)

    async def _index_after(self, info: CopyInfo, number: int) -> int:
        """Tell where a reader goes on that has the event of this number."""
        index = await self._store.index_after(info.key, number)
        if index >= info.blocks and is_interruption(info.snapshot):
            # Its client may have seen more than its proxy has left of the copy.
            return info.blocks - 1
        return index

    async def _start_stream(self, down: Downstream, upstream_headers: Pairs | None) -> None:
        head = response_headers(
            upstream_headers or _EVENT_STREAM,
            request_id=down.request_id,
            event_stream=True,
            rewritten=True,
            decoded=False,
        )
        await down.start(_OK, head)

    @staticmethod
    def _end(down: Downstream, ending: Ending) -> None:
        """End cleanly, also where the run goes on elsewhere; cut what can't be told any more."""
        if ending is Ending.LOST:
            down.writer.cut()
        else:
            down.writer.end()


def _outcome(ending: Ending, whole: Outcome | None) -> Outcome:
    """Say how a follower's stream ended; a whole one ended as the response did."""
    if ending is Ending.WHOLE:
        return whole or Outcome.COMPLETED
    return Outcome.STOPPED if ending is Ending.ELSEWHERE else Outcome.LOST


def _outcome_of(info: CopyInfo) -> Outcome | None:
    """Say how the response of an ended copy ended, by its object."""
    status = status_of(info.snapshot)
    return Outcome(status) if status in ENDED else None


def away(error: StoreError) -> RequestError:
    """The 503 of a store that does not answer."""
    return RequestError(503, f"The store of background responses does not answer: {error}")


def why_no_events(found: Run | RemoteRun | CopyInfo | Tombstone) -> str | None:
    """Say why the events of a response are not there to be streamed; None if they are."""
    if isinstance(found, Tombstone):
        return f"its events were kept for a time and are gone ({found.reason})"
    if isinstance(found, Run | RemoteRun):
        return "its events could not be kept" if found.copy_lost else None
    return (
        "it was created without stream, and its events were not kept" if is_object(found) else None
    )


def status_of(snapshot: bytes) -> str:
    """Return the status that a response object says."""
    payload = read_payload(b'{"response":%b}' % snapshot)
    return (payload.status if payload else None) or "unknown"


def cannot_cancel(status: str) -> BadRequestError:
    """The 400 of a response that has ended."""
    article = "an" if status == "incomplete" else "a"
    return BadRequestError(
        _BAD_REQUEST, f"Cannot cancel {article} {status} response.", param="response_id"
    )


def no_stream(why: str) -> BadRequestError:
    """The 400 of a response whose events are not there."""
    return BadRequestError(
        _BAD_REQUEST,
        f"This response can no longer be streamed: {why}. GET without stream may still work.",
        param="stream",
    )


def read_query(target: bytes) -> tuple[bool, int]:
    """Read ``stream`` and ``starting_after`` as vLLM does: the last of repeated keys counts."""
    query = dict(parse_qsl(target.partition(b"?")[2].decode("latin-1"), keep_blank_values=True))
    stream = truth(query.get("stream", "false"))
    if stream is None:
        raise BadRequestError(_BAD_REQUEST, "stream must be true or false.", param="stream")
    try:
        after = int(query.get("starting_after", FROM_THE_START))
    except ValueError as error:
        raise BadRequestError(
            _BAD_REQUEST, "starting_after must be an integer.", param="starting_after"
        ) from error
    return stream, FROM_THE_START if after < 0 else min(after, _LARGEST_NUMBER)
