"""Answers about background responses: their streams, their objects, why they cannot be had."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from proxy.background.follower import Ending, follow, replay
from proxy.background.recovery import INTERRUPTED
from proxy.background.run import Run
from proxy.core.background import error_message, truth
from proxy.core.responses import read_payload
from proxy.errors import BadRequestError, RequestError
from proxy.gateway.heartbeat import Heartbeat
from proxy.store import CopyInfo, StoreError, Tombstone
from proxy.upstream.headers import response_headers

if TYPE_CHECKING:
    from proxy.gateway.downstream import Downstream
    from proxy.settings import Settings
    from proxy.store import Store
    from proxy.upstream.headers import Pairs

__all__ = [
    "FROM_THE_START",
    "StreamAnswers",
    "away",
    "cannot_cancel",
    "is_object",
    "no_stream",
    "read_query",
    "status_of",
    "why_no_events",
]

FROM_THE_START = -2  # a comment before the first event has -1
_LARGEST_NUMBER = 2**63 - 1  # what SQLite takes
_EVENT_STREAM: Pairs = [(b"content-type", b"text/event-stream; charset=utf-8")]
_BAD_REQUEST = 400
_OK = 200


class StreamAnswers:
    """Streams of copies: followed while they are made, replayed when they have ended."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store

    async def follow(
        self, down: Downstream, run: Run, after: int, upstream_headers: Pairs | None
    ) -> None:
        """Answer with a run's events behind the number ``after``, until it ends."""
        await self._start_stream(down, upstream_headers)
        heartbeat = Heartbeat(
            down.writer,
            run.corrector,
            every_s=self._settings.heartbeat_s,
            kind=self._settings.heartbeat_kind,
        )
        try:
            with heartbeat:
                ending = await follow(run, self._store, after, down.writer)
        except StoreError:
            ending = Ending.LOST
        self._end(down, ending)

    async def replay(self, down: Downstream, info: CopyInfo, after: int) -> None:
        """Answer with the events of an ended copy behind the number ``after``."""
        store = self._store
        try:
            index = await store.index_after(info.key, after)
            if index >= info.blocks and error_message(info.snapshot) == INTERRUPTED:
                # Its client may have seen more than a crash has left of the copy.
                index = info.blocks - 1
        except StoreError as error:
            raise away(error) from error
        await self._start_stream(down, None)
        try:
            ending = await replay(store, info.key, index, info.blocks, down.writer)
        except StoreError:
            ending = Ending.LOST
        self._end(down, ending)

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


def away(error: StoreError) -> RequestError:
    """The 503 of a store that does not answer."""
    return RequestError(503, f"The store of background responses does not answer: {error}")


def is_object(info: CopyInfo) -> bool:
    """Whether vLLM keeps the response itself, and only its owner is known here."""
    return b'"mode":"object"' in info.meta


def why_no_events(found: Run | CopyInfo | Tombstone) -> str | None:
    """Say why the events of a response are not there to be streamed; None if they are."""
    if isinstance(found, Tombstone):
        return f"its events were kept for a time and are gone ({found.reason})"
    if isinstance(found, Run):
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
        f"This response can no longer be streamed: {why}. GET without stream still works.",
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
