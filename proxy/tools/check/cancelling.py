"""Cancel a running background response and see whether its streams end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.tools.check.background import creating
from proxy.tools.check.probe import Answers, Probe, answering, ended_in_failure, how_it_stopped
from proxy.tools.check.questions import CANCELLED_REPLAY, CANCELLED_STREAM
from proxy.tools.check.report import Answer, NotAskedError

if TYPE_CHECKING:
    from proxy.tools.check.server import Server
    from proxy.tools.check.stream_reader import StreamReader

__all__ = ["CANCELLED_RESPONSE"]

_TRIES = 3
_OK = 200
_BAD_REQUEST = 400


async def _ask(server: Server, answers: Answers) -> None:
    """Try until a cancel comes before the end: a tiny model is done within a second."""
    for _ in range(_TRIES):
        async with creating(server, max_output_tokens=server.long_answer_tokens) as stream:
            response_id = await _until_running(server, stream)
            if await _cancelled(server, response_id):
                await _look(server, stream, response_id, answers)
                return
    raise NotAskedError(f"finished {_TRIES} times before it could be cancelled")


async def _until_running(server: Server, stream: StreamReader) -> str:
    await stream.read(server.patience.answer_s, until=lambda seen: seen.response_id is not None)
    if stream.response_id is None:
        raise NotAskedError(how_it_stopped(stream))
    return stream.response_id


async def _cancelled(server: Server, response_id: str) -> bool:
    """Cancel; False if it was finished already, which a server says with 400."""
    reply = await server.cancel(response_id)
    if reply.status not in (_OK, _BAD_REQUEST):
        raise reply.refused()
    return reply.status == _OK


async def _look(server: Server, stream: StreamReader, response_id: str, answers: Answers) -> None:
    """Read the stream and a replay at once, so that two that hang cost the time of one."""

    async def read_stream() -> None:
        await stream.read(server.patience.ending_s)
        with answering(answers, CANCELLED_STREAM):
            answers[CANCELLED_STREAM] = _ended(stream)

    async def read_replay() -> None:
        with answering(answers, CANCELLED_REPLAY):
            async with server.replay(response_id) as replay:
                await replay.read(server.patience.ending_s)
            answers[CANCELLED_REPLAY] = _ended(replay)

    await asyncio.gather(read_stream(), read_replay())


def _ended(reader: StreamReader) -> Answer:
    if reader.terminal is not None and reader.terminal.status in ("completed", "incomplete"):
        raise NotAskedError("finished before it could be cancelled")
    return ended_in_failure(reader)


CANCELLED_RESPONSE = Probe(
    "a cancelled background response", (CANCELLED_STREAM, CANCELLED_REPLAY), _ask
)
