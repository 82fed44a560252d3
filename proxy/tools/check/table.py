"""The report as a table for people: what, what this server does, with Lastword in front."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from proxy.tools.check.report import Verdict, printable

if TYPE_CHECKING:
    from rich.console import Console

    from proxy.tools.check.report import Answer, Asked, Question, Report

__all__ = ["print_report"]

_WORDS = {
    Verdict.OK: ("ok", "green"),
    Verdict.FAULT: ("FAULT", "bold red"),
    Verdict.NOT_APPLICABLE: ("n/a", "dim"),
    Verdict.NOT_ASKED: ("NOT ASKED", "bold yellow"),
}


def print_report(console: Console, report: Report) -> None:
    """Print the table and what follows from it; it needs neither colour nor a wide terminal."""
    console.print(_title(report.server), highlight=False)
    if report.through:
        console.print(Text("through ") + _title(report.through), highlight=False)
    console.print(_table(report))
    for reason, names in _not_applicable(report).items():
        console.print(Text(f"Not applicable ({reason}): {', '.join(names)}."))
    for asked in filter(None, (report.server, report.through)):
        if asked.stored:
            console.print(
                Text(
                    f"{asked.url} keeps the {asked.stored} background responses that this has made"
                    " (vLLM has no DELETE)."
                )
            )
    console.print(Text(report.summary, style="bold"))


def _title(asked: Asked) -> Text:
    version = f"vLLM {asked.version}" if asked.version else "of unknown version"
    return Text(f"{asked.url} ({version}), model {printable(asked.model)}")


def _table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("this server", ratio=1)
    table.add_column("through the proxy" if report.through else "with Lastword in front", ratio=1)
    for question, answer in report.server.answers.items():
        through = report.through.answers[question] if report.through else None
        if all(a.verdict is Verdict.NOT_APPLICABLE for a in (answer, through or answer)):
            continue
        what = _what(question, answer, through)
        table.add_row(what, _cell(answer), _last_cell(question, answer, through))
    return table


def _what(question: Question, *answers: Answer | None) -> Text:
    """Name the question, with vLLM's issues where the fault is seen."""
    told = Text(question.what)
    if any(answer and answer.verdict is Verdict.FAULT for answer in answers):
        for number in question.issues:
            told.append(f"\n  vllm#{number}", style="dim")
    return told


def _cell(answer: Answer) -> Text:
    word, style = _WORDS[answer.verdict]
    told = Text(word, style=style)
    return told if answer.verdict is Verdict.OK else told + Text(f": {answer.observed}")


def _last_cell(question: Question, answer: Answer, through: Answer | None) -> Text:
    """Say what came through the proxy, or else what is known to come."""
    if through is None:
        return _expected(question, answer)
    hint = _expected(question, through)
    return Text("\n").join([_cell(through), hint] if hint else [_cell(through)])


def _expected(question: Question, answer: Answer) -> Text:
    """Say what Lastword makes of a fault."""
    if answer.verdict is not Verdict.FAULT:
        return Text("")
    return Text(question.lastword, style="green" if question.corrects else "")


def _not_applicable(report: Report) -> dict[str, list[str]]:
    """Group what makes no sense here by the reason, as one cause has many effects."""
    reasons: dict[str, list[str]] = {}
    for question, answer in report.decisive.answers.items():
        if answer.verdict is Verdict.NOT_APPLICABLE:
            reasons.setdefault(answer.observed, []).append(question.what)
    return reasons
