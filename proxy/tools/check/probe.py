"""A probe: one thing that is done to a server, and the questions that it answers."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.core.responses import FAILED
from proxy.tools.check.report import (
    Answer,
    NotApplicableError,
    NotAskedError,
    Question,
    Verdict,
    counted,
    fault,
    fine,
    printable,
)
from proxy.tools.check.stream_reader import Ending

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from proxy.tools.check.server import Server
    from proxy.tools.check.stream_reader import StreamReader

__all__ = ["Answers", "Probe", "answering", "ended_in_failure", "ended_truncated", "how_it_stopped"]

Answers = dict[Question, Answer]


@dataclass(frozen=True)
class Probe:
    """What is said while it runs, what it answers, and the asking, which fills in the answers."""

    what: str
    questions: tuple[Question, ...]
    ask: Callable[[Server, Answers], Awaitable[None]]


@contextlib.contextmanager
def answering(answers: Answers, *questions: Question) -> Iterator[None]:
    """Let the reason why a block could not go on answer those questions that are still open."""
    try:
        yield
    except NotApplicableError as reason:
        answer = Answer(Verdict.NOT_APPLICABLE, printable(str(reason)))
    except NotAskedError as reason:
        answer = Answer(Verdict.NOT_ASKED, printable(str(reason)))
    else:
        return
    for question in questions:
        answers.setdefault(question, answer)


def ended_truncated(reader: StreamReader) -> Answer:
    """Judge the last event of a stream that hit its token limit."""
    terminal = reader.terminal
    if terminal is None:
        raise NotAskedError(how_it_stopped(reader))
    if terminal.name == FAILED and not terminal.corrected:
        raise NotAskedError("the response failed")
    return _named(reader) or fine(terminal.name)


def ended_in_failure(reader: StreamReader) -> Answer:
    """Judge the end of a stream whose generation failed, or was cancelled, after its start."""
    if reader.terminal is None:
        return fault(how_it_stopped(reader))
    return _named(reader) or fine(reader.terminal.name)


def _named(reader: StreamReader) -> Answer | None:
    """Say that the name of the terminal event is wrong, if it is."""
    terminal = reader.terminal
    if terminal is None:
        return None
    told = f"{terminal.says}, status {terminal.status}"
    if terminal.contradiction:  # it is passed as it is: which of the two is true, nobody knows
        raise NotAskedError(told)
    return fault(told) if terminal.corrected else None


def how_it_stopped(reader: StreamReader) -> str:
    """Say in a few words how a stream without a terminal event stopped."""
    events = counted(len(reader.blocks), "event")
    place = f"after {events}" if reader.blocks else "before any event"
    if reader.ending is Ending.SILENT:
        return f"stays open, silent {place}"
    how = "cut" if reader.ending is Ending.CUT else "ends"
    return f"{how} {place}" + (", none terminal" if reader.blocks else "")
