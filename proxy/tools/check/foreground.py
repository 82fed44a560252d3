"""Ask for a stream that hits its token limit, and judge all that it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.tools.check.probe import Answers, Probe, answering, ended_truncated, how_it_stopped
from proxy.tools.check.questions import ONE_END, TRUNCATED
from proxy.tools.check.report import Answer, NotAskedError, counted, fault, fine
from proxy.tools.check.server import SHORT_ANSWER_TOKENS, RefusedError
from proxy.tools.check.stream_reader import Ending
from proxy.tools.check.stream_rules import RULES, ToldStream

if TYPE_CHECKING:
    from proxy.tools.check.server import Server
    from proxy.tools.check.stream_reader import StreamReader

__all__ = ["TRUNCATED_STREAM", "NoResponsesApiError"]


_NO_SUCH_ROUTE = frozenset({404, 405, 501})


class NoResponsesApiError(Exception):
    """The server knows the model, and has no ``POST /v1/responses``."""


async def _ask(server: Server, answers: Answers) -> None:
    patience = server.patience
    try:
        async with server.create() as reader:
            await reader.read_to_end(patience.answer_s, patience.ending_s)
    except RefusedError as refused:
        if refused.status in _NO_SUCH_ROUTE and server.model not in refused.said:
            raise NoResponsesApiError from refused
        raise
    with answering(answers, TRUNCATED):
        answers[TRUNCATED] = ended_truncated(reader)
    with answering(answers, ONE_END):
        answers[ONE_END] = _one_end(reader)
    if reader.terminal is None:
        raise NotAskedError("the stream has no terminal event")
    stream = ToldStream(
        reader.blocks,
        reader.terminal,
        max_output_tokens=SHORT_ANSWER_TOKENS,
        ignores_eos=server.takes_extras is True,
    )
    for question, rule in RULES.items():
        with answering(answers, question):
            answers[question] = rule(stream)


def _one_end(reader: StreamReader) -> Answer:
    if reader.terminal is None:
        if reader.ending is Ending.SILENT:  # it may be busy
            raise NotAskedError(how_it_stopped(reader))
        return fault(how_it_stopped(reader))
    if reader.behind:
        return fault(f"{counted(reader.behind, 'event')} behind the terminal one")
    if reader.ending is not Ending.CLEAN:
        how = "stays open" if reader.ending is Ending.SILENT else "is cut"
        return fault(f"{how} after its terminal event")
    return fine("yes")


TRUNCATED_STREAM = Probe("a truncated stream", (TRUNCATED, ONE_END, *RULES), _ask)
