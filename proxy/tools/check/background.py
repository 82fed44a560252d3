"""Ask for background responses and for their streams once more, from various places on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from proxy.core.background import sequence_number
from proxy.tools.check.probe import Answers, Probe, answering, ended_truncated, how_it_stopped
from proxy.tools.check.questions import (
    BACKGROUND,
    BACKGROUND_TRUNCATED,
    CURSOR_BEYOND,
    CURSOR_NEGATIVE,
    REPLAY,
    UNSTREAMED,
)
from proxy.tools.check.report import Answer, NotApplicableError, NotAskedError, counted, fault, fine
from proxy.tools.check.server import RefusedError
from proxy.tools.check.stream_reader import Ending

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from proxy.tools.check.server import Server
    from proxy.tools.check.stream_reader import StreamReader

__all__ = ["STREAM_AND_REPLAYS", "UNSTREAMED_RESPONSE", "creating"]

_CLIENT_ERRORS = range(400, 500)


@contextlib.asynccontextmanager
async def creating(server: Server, **members: Any) -> AsyncIterator[StreamReader]:
    """Create a background stream; ``NotApplicableError`` where the server makes none."""
    async with contextlib.AsyncExitStack() as stack:
        with _needing_a_store():
            creation = server.create(background=True, **members)
            reader = await stack.enter_async_context(creation)
        yield reader


@contextlib.contextmanager
def _needing_a_store() -> Iterator[None]:
    try:
        yield
    except RefusedError as refused:
        if refused.status in _CLIENT_ERRORS and "background" in refused.said:
            raise NotApplicableError("its store is off") from refused
        raise


async def _ask_stream(server: Server, answers: Answers) -> None:
    patience = server.patience
    async with creating(server) as reader:
        await reader.read_to_end(patience.answer_s, patience.ending_s)
    answers[BACKGROUND] = fine("makes them")
    with answering(answers, BACKGROUND_TRUNCATED):
        answers[BACKGROUND_TRUNCATED] = ended_truncated(reader)
    response_id = reader.response_id
    if response_id is None or reader.terminal is None:
        raise NotAskedError(how_it_stopped(reader))
    with answering(answers, REPLAY):
        answers[REPLAY] = _is_the_same(await _replay(server, response_id), reader)
    last = sequence_number(reader.blocks[-1])
    if last is None:
        raise NotAskedError("its events have no numbers")
    with answering(answers, CURSOR_BEYOND):
        answers[CURSOR_BEYOND] = _is_empty(await _replay(server, response_id, last))
    with answering(answers, CURSOR_NEGATIVE):
        answers[CURSOR_NEGATIVE] = _is_whole(await _replay(server, response_id, -2), reader)


async def _replay(
    server: Server, response_id: str, after: int | None = None
) -> StreamReader | RefusedError:
    """Read the stream of a finished response: all of it is there already."""
    try:
        async with server.replay(response_id, after) as reader:
            await reader.read(server.patience.ending_s)
    except RefusedError as refused:
        return refused
    return reader


def _is_the_same(replay: StreamReader | RefusedError, stream: StreamReader) -> Answer:
    if isinstance(replay, RefusedError):
        return fault(str(replay))
    if replay.ending is not Ending.CLEAN:
        return fault(how_it_stopped(replay))
    if replay.blocks != stream.blocks:
        return fault(f"{len(replay.blocks)} of {len(stream.blocks)} events, or others")
    return fine("the stream, event for event")


def _is_empty(replay: StreamReader | RefusedError) -> Answer:
    if isinstance(replay, RefusedError):
        return _said_no(replay)
    if replay.blocks:
        return fault(f"gives {counted(len(replay.blocks), 'event')}")
    if replay.ending is not Ending.CLEAN:
        return fault(how_it_stopped(replay))
    return fine("ends at once")


def _is_whole(replay: StreamReader | RefusedError, stream: StreamReader) -> Answer:
    if isinstance(replay, RefusedError):
        return _said_no(replay)
    if replay.ending is not Ending.CLEAN:
        return fault(how_it_stopped(replay))
    if replay.blocks != stream.blocks:
        return fault(f"gives {len(replay.blocks)} of {len(stream.blocks)} events")
    return fine("gives all events")


def _said_no(refused: RefusedError) -> Answer:
    if refused.status not in _CLIENT_ERRORS:
        raise refused
    return fine(f"refused ({refused.status})")


async def _ask_unstreamed(server: Server, answers: Answers) -> None:
    with _needing_a_store():
        response_id = await server.create_unstreamed()
    try:
        async with server.replay(response_id) as reader:
            await reader.read_to_end(server.patience.answer_s, server.patience.ending_s)
    except RefusedError as refused:
        answers[UNSTREAMED] = _said_no(refused)
        return
    if reader.terminal is not None:
        answers[UNSTREAMED] = fine("gives it")
    elif reader.ending is Ending.SILENT:  # it may be busy
        raise NotAskedError(how_it_stopped(reader))
    else:
        answers[UNSTREAMED] = fault(how_it_stopped(reader))


STREAM_AND_REPLAYS = Probe(
    "a background stream and its replays",
    (BACKGROUND, BACKGROUND_TRUNCATED, REPLAY, CURSOR_BEYOND, CURSOR_NEGATIVE),
    _ask_stream,
)
UNSTREAMED_RESPONSE = Probe(
    "the stream of a background response made without one", (UNSTREAMED,), _ask_unstreamed
)
