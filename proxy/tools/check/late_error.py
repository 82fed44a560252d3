"""Ask for something that fails after the stream has begun.

A token outside the vocabulary in ``logit_bias`` does: vLLM refuses it in its API server, before the
engine has heard of the request, but after ``response.created`` was sent.  Nothing is generated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.tools.check.background import creating
from proxy.tools.check.probe import Answers, Probe, ended_in_failure, how_it_stopped
from proxy.tools.check.questions import BACKGROUND_LATE_ERROR, LATE_ERROR
from proxy.tools.check.report import Answer, NotAskedError, fine
from proxy.tools.check.server import RefusedError
from proxy.tools.check.stream_reader import Ending

if TYPE_CHECKING:
    from proxy.tools.check.server import Server
    from proxy.tools.check.stream_reader import StreamReader

__all__ = ["ERROR_IN_BACKGROUND", "ERROR_IN_STREAM"]

_FAILING: dict[str, Any] = {"logit_bias": {"9999999": 1}}
_BAD_REQUEST = 400


async def _ask_direct(server: Server, answers: Answers) -> None:
    patience = server.patience
    try:
        async with server.create(**_FAILING) as reader:
            await reader.read_to_end(patience.answer_s, patience.ending_s)
    except RefusedError as refused:
        answers[LATE_ERROR] = _refused(refused)
        return
    if reader.ending is Ending.SILENT and reader.terminal is None:  # it may be busy
        raise NotAskedError(how_it_stopped(reader))
    answers[LATE_ERROR] = _failed(reader)


async def _ask_background(server: Server, answers: Answers) -> None:
    patience = server.patience
    try:
        async with creating(server, **_FAILING) as reader:
            await reader.read(patience.answer_s, until=lambda seen: bool(seen.blocks))
            if not reader.blocks:  # it may be busy
                raise NotAskedError(how_it_stopped(reader))
            await reader.read_to_end(patience.ending_s, patience.ending_s)
    except RefusedError as refused:
        answers[BACKGROUND_LATE_ERROR] = _refused(refused)
        return
    answers[BACKGROUND_LATE_ERROR] = _failed(reader)


def _refused(refused: RefusedError) -> Answer:
    if refused.status != _BAD_REQUEST:
        raise refused
    return fine("refused before it starts (400)")


def _failed(reader: StreamReader) -> Answer:
    if reader.terminal is not None and reader.terminal.status in ("completed", "incomplete"):
        raise NotAskedError("it takes an impossible logit_bias and answers all the same")
    return ended_in_failure(reader)


ERROR_IN_STREAM = Probe("an error after the start", (LATE_ERROR,), _ask_direct)
ERROR_IN_BACKGROUND = Probe("an error in the background", (BACKGROUND_LATE_ERROR,), _ask_background)
