"""What is told of one request when it has ended, and who is told."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from proxy.core.corrector import Corrector, Mode
    from proxy.core.outcome import Outcome

__all__ = ["ANSWERED", "NAME_LENGTH", "REFUSED", "Observer", "Record", "brief", "trace_id"]

ANSWERED = "answered"
"""The outcome of an answer that is no stream that was looked at, and of a closed WebSocket."""
REFUSED = "refused"
"""The outcome of a request that the proxy answered with an error of its own."""

NAME_LENGTH = 128  # of what a client may choose: a log line has its limits
# W3C Trace Context, section 3.2: version, trace-id, parent-id, flags; zeros are no trace-id.
# Version 00 ends there, later ones may say more, ff is none.
_TRACEPARENT = re.compile(
    rb"(?:00(?=.{53}\Z)|(?!00|ff)[0-9a-f]{2})"
    rb"-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)


@dataclass(slots=True)
class Record:
    """One request; what there is nothing to tell of stays None.

    Times are the event loop's, in seconds.  ``route`` is a template, never what a client has
    written.  ``events`` and ``bytes`` are those of the body: events that passed, bytes that
    upstream sent (transfer-decoded) or that the proxy wrote of its own.
    """

    method: str
    request_id: str
    trace_id: str | None
    began_at: float
    route: str = "other"
    status: int | None = None
    outcome: str | None = None
    response_id: str | None = None
    model: str | None = None
    mode: Mode | None = None
    corrected: bool | None = None
    events: int | None = None
    bytes: int | None = None
    first_event_at: float | None = None

    def note_stream(self, corrector: Corrector, outcome: str) -> None:
        """Take over what was seen of an event stream."""
        self.outcome = outcome
        self.response_id = brief(corrector.response_id) or self.response_id
        self.model = brief(corrector.model)
        self.corrected = corrector.corrected


class Observer(Protocol):
    """Who is told of requests and streams, so that an operator can see them."""

    def stream_ended(
        self,
        corrector: Corrector,
        mode: Mode,
        outcome: Outcome,
        *,
        seconds: float,
        first_event_s: float | None,
    ) -> None:
        """Take note of a relayed event stream, once, at its end."""

    def stream_compressed(self, *, decoded: bool) -> None:
        """Take note of an event stream that came compressed although identity was asked for."""

    def replayed(self, source: str) -> None:
        """Take note of a replay: from a ``copy_live``, a ``copy_stored`` or from ``upstream``."""

    def upstream_failed(self, kind: str) -> None:
        """Take note that upstream could not be asked, did not answer, or left a WebSocket."""

    def limit_reached(self, limit: str) -> None:
        """Take note of a request that was turned away because the setting ``limit`` is reached."""

    def request_ended(self, record: Record, seconds: float) -> None:
        """Take note of a request that has ended, after so many seconds."""


def trace_id(traceparent: list[bytes]) -> str | None:
    """Return the trace id of the ``traceparent`` headers; None unless one valid one is there."""
    match = _TRACEPARENT.fullmatch(traceparent[0]) if len(traceparent) == 1 else None
    return match[1].decode() if match else None


def brief(name: str | None) -> str | None:
    """Return as much of a name that a client may have chosen as a log line has room for."""
    return None if name is None else name[:NAME_LENGTH]
