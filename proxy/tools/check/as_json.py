"""The report for machines: one JSON object, whose shape a version number stands for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import proxy
from proxy.tools.check.report import ExitStatus, Verdict

if TYPE_CHECKING:
    from proxy.tools.check.report import Answer, Asked, Report

__all__ = ["VERSION", "error_as_json", "report_as_json"]

VERSION = 1
"""Goes up when a member goes away or changes its meaning; members may be added."""
_ISSUE = "https://github.com/vllm-project/vllm/issues/"


def report_as_json(report: Report) -> str:
    """Write the whole report."""
    through = report.through
    return _write(
        report.exit_status,
        report.summary,
        server=_server(report.server),
        through=_server(through) if through else None,
        questions=[
            {
                "id": question.id,
                "what": question.what,
                "server": _answer(answer),
                "through": _answer(through.answers[question]) if through else None,
                "lastword": {"corrects": question.corrects, "does": question.lastword},
                "issues": [f"{_ISSUE}{number}" for number in question.issues],
            }
            for question, answer in report.server.answers.items()
        ],
    )


def error_as_json(sentence: str) -> str:
    """Write that nothing could be asked, and why."""
    status = ExitStatus.UNREACHABLE
    return _write(status, sentence, server=None, through=None, questions=[])


def _write(status: ExitStatus, summary: str, **members: Any) -> str:
    head = {"version": VERSION, "lastword": proxy.__version__}
    told = head | {"exit_status": int(status), "summary": summary} | members
    return json.dumps(told, indent=2)


def _server(asked: Asked) -> dict[str, Any]:
    return {
        "url": asked.url,
        "vllm": asked.version,
        "model": asked.model,
        "to_correct": [question.id for question in asked.faults(corrects=True)],
        "left": [question.id for question in asked.faults(corrects=False)],
        "not_asked": [question.id for question in asked.with_verdict(Verdict.NOT_ASKED)],
        "stored": asked.stored,
    }


def _answer(answer: Answer) -> dict[str, str]:
    return {"verdict": answer.verdict.value, "observed": answer.observed}
