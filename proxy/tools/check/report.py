"""What was asked, what was found, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

from proxy.errors import LastwordError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Answer",
    "Asked",
    "CheckError",
    "ExitStatus",
    "NotApplicableError",
    "NotAskedError",
    "Question",
    "Report",
    "Verdict",
    "counted",
    "fault",
    "fine",
    "printable",
]

_LONGEST = 300


class Verdict(StrEnum):
    """What became of a question."""

    OK = "ok"
    FAULT = "fault"
    NOT_APPLICABLE = "not_applicable"
    NOT_ASKED = "not_asked"


class ExitStatus(IntEnum):
    """What the command tells a script."""

    NOTHING_TO_CORRECT = 0
    FAULTS = 1
    UNREACHABLE = 2
    NOT_ALL_ASKED = 3


class CheckError(LastwordError):
    """A server that cannot be checked at all; the sentence says why and what to do."""


class NotApplicableError(Exception):
    """A question makes no sense at this server; the sentence says why."""


class NotAskedError(Exception):
    """A question could not be asked, or its answer tells nothing; the sentence says why."""


@dataclass(frozen=True)
class Question:
    """One thing that a server does rightly or not.

    ``lastword`` says what clients get with Lastword in front of a server that has the fault, and
    ``corrects`` whether that is right.  ``issues`` are numbers of vLLM's issues and pull requests.
    """

    id: str
    what: str
    lastword: str
    corrects: bool = True
    issues: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a server does, in a few printable words, and whether it is right."""

    verdict: Verdict
    observed: str


def fine(observed: str) -> Answer:
    """Return the answer of a server that is right."""
    return Answer(Verdict.OK, printable(observed))


def fault(observed: str) -> Answer:
    """Return the answer of a server that is wrong."""
    return Answer(Verdict.FAULT, printable(observed))


@dataclass(frozen=True)
class Asked:
    """One address and what it answered; ``stored`` counts the responses that it still keeps."""

    url: str
    version: str | None
    model: str
    answers: Mapping[Question, Answer] = field(default_factory=dict)
    stored: int = 0

    def faults(self, *, corrects: bool) -> list[Question]:
        """List the questions that show a fault which Lastword corrects, or one that it leaves."""
        return [
            question
            for question, answer in self.answers.items()
            if answer.verdict is Verdict.FAULT and question.corrects is corrects
        ]

    def with_verdict(self, verdict: Verdict) -> list[Question]:
        """List the questions with one verdict."""
        return [question for question, answer in self.answers.items() if answer.verdict is verdict]


@dataclass(frozen=True)
class Report:
    """What a server answered, and what came through the proxy in front of it, if that was asked."""

    server: Asked
    through: Asked | None = None

    @property
    def decisive(self) -> Asked:
        """What clients get: through the proxy if that was asked, else from the server."""
        return self.through or self.server

    @property
    def exit_status(self) -> ExitStatus:
        """Faults that Lastword corrects count before questions that could not be asked."""
        if self.decisive.faults(corrects=True):
            return ExitStatus.FAULTS
        if self.decisive.with_verdict(Verdict.NOT_ASKED):
            return ExitStatus.NOT_ALL_ASKED
        return ExitStatus.NOTHING_TO_CORRECT

    @property
    def summary(self) -> str:
        """What an operator in a hurry needs to know, in a sentence or two."""
        status = self.exit_status
        wrong = counted(len(self.decisive.faults(corrects=True)), "fault")
        left = self.decisive.faults(corrects=False)
        unasked = counted(len(self.decisive.with_verdict(Verdict.NOT_ASKED)), "question")
        if status is ExitStatus.FAULTS:
            told = f"Lastword corrects {wrong} of this server."
            if self.through:
                told = f"{wrong} that Lastword can correct came through {self.through.url}."
        elif status is ExitStatus.NOT_ALL_ASKED:
            told = f"No fault that Lastword corrects was seen, but {unasked} could not be asked."
        elif self.through:
            told = f"Nothing that Lastword corrects came through {self.through.url}."
        else:
            told = "There is nothing to correct: this server does not need Lastword."
        return told + (f" It does not touch {counted(len(left), 'other fault')}." if left else "")


def counted(number: int, what: str) -> str:
    """Return a number with what it counts, in the plural where it asks for it."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def printable(text: str) -> str:
    """Return what a server said as one line that is safe to print, cut to a few hundred letters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 2 * _LONGEST]).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."
