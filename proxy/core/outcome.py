"""How an event stream ended, in one word for metrics and logs."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from proxy.core.responses import COMPLETED, INCOMPLETE

if TYPE_CHECKING:
    from proxy.core.responses import Terminal

__all__ = ["Outcome", "outcome_of"]


class Outcome(StrEnum):
    """How a stream ended.

    The first four are the terminal event's own word, under the name that it is, or in mode
    observe would be, sent with.  A client that leaves behind the terminal event has had the
    whole stream, so the terminal event's word counts before the others.
    """

    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"  # upstream did not end it
    STOPPED = "stopped"  # this proxy ended it: its shutdown, or a crash of an earlier process
    CLIENT_GONE = "client_gone"


def outcome_of(terminal: Terminal | None) -> Outcome | None:
    """Return what upstream's terminal event says; None if there was none."""
    if terminal is None:
        return None
    if terminal.status == "cancelled":
        return Outcome.CANCELLED
    if terminal.name == COMPLETED:
        return Outcome.COMPLETED
    return Outcome.INCOMPLETE if terminal.name == INCOMPLETE else Outcome.FAILED
