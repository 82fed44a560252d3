"""The catalogue: every question that a server is asked, in the order in which it is shown.

The faults were all seen on real vLLMs of 0.10 to 0.32.  The identifiers are part of the JSON that
scripts read: they stay.
"""

from __future__ import annotations

from typing import Final

from proxy.tools.check.report import Question

__all__ = [
    "ALL",
    "BACKGROUND",
    "BACKGROUND_LATE_ERROR",
    "BACKGROUND_TRUNCATED",
    "CANCELLED_REPLAY",
    "CANCELLED_STREAM",
    "CONTENT_INDEX",
    "CURSOR_BEYOND",
    "CURSOR_NEGATIVE",
    "DONE_EVENTS",
    "ITEM_IDS",
    "ITEM_STATUS",
    "LAST_OUTPUT",
    "LATE_ERROR",
    "NUMBERS",
    "ONE_END",
    "REASONING_EVENTS",
    "REPLAY",
    "TRUNCATED",
    "TRUNCATED_STATUS",
    "UNSTREAMED",
    "USAGE",
]

_FIX = (59324, 45386)
_LEFT: Final = "left as it is"

TRUNCATED: Final = Question(
    "truncated", "truncated stream", "ends with response.incomplete", issues=_FIX
)
ONE_END: Final = Question(
    "one_end", "one end of a stream", "one terminal event, and nothing behind it"
)
LATE_ERROR: Final = Question("late_error", "error after the start", "response.failed, then a cut")
BACKGROUND: Final = Question(
    "background", "background response", "makes it itself (--background auto)"
)
BACKGROUND_TRUNCATED: Final = Question(
    "background_truncated",
    "background: truncated",
    "ends with response.incomplete",
    issues=_FIX,
)
REPLAY: Final = Question("replay", "background: replay", "the stream, event for event")
CURSOR_BEYOND: Final = Question(
    "cursor_beyond", "starting_after the end", "ends at once, without an event"
)
CURSOR_NEGATIVE: Final = Question("cursor_negative", "starting_after -2", "gives all events")
UNSTREAMED: Final = Question(
    "unstreamed", "stream=true afterwards", "gives the stream, or 400 and why"
)
CANCELLED_STREAM: Final = Question(
    "cancelled_stream", "cancelled: stream", "ends with response.failed"
)
CANCELLED_REPLAY: Final = Question(
    "cancelled_replay", "cancelled: replay", "ends with response.failed"
)
BACKGROUND_LATE_ERROR: Final = Question(
    "background_late_error",
    "background: late error",
    "response.failed; at once only with --background proxy",
)
TRUNCATED_STATUS: Final = Question("truncated_status", "truncated: status", _LEFT, corrects=False)
NUMBERS: Final = Question("numbers", "events: numbers, names", _LEFT, corrects=False)
CONTENT_INDEX: Final = Question(
    "content_index", "events: content_index", _LEFT, corrects=False, issues=(45742,)
)
DONE_EVENTS: Final = Question(
    "done_events", "events: parts are done", _LEFT, corrects=False, issues=(37071,)
)
REASONING_EVENTS: Final = Question("reasoning_events", "events: reasoning", _LEFT, corrects=False)
USAGE: Final = Question("usage", "last event: usage", _LEFT, corrects=False)
LAST_OUTPUT: Final = Question(
    "last_output",
    "last event: output",
    "left as it is; whole in GET of a background response",
    corrects=False,
)
ITEM_STATUS: Final = Question(
    "item_status", "last event: item status", _LEFT, corrects=False, issues=(57998,)
)
ITEM_IDS: Final = Question(
    "item_ids", "last event: item ids", _LEFT, corrects=False, issues=(47916, 23218)
)

ALL: Final = (
    TRUNCATED,
    ONE_END,
    LATE_ERROR,
    BACKGROUND,
    BACKGROUND_TRUNCATED,
    REPLAY,
    CURSOR_BEYOND,
    CURSOR_NEGATIVE,
    UNSTREAMED,
    CANCELLED_STREAM,
    CANCELLED_REPLAY,
    BACKGROUND_LATE_ERROR,
    TRUNCATED_STATUS,
    NUMBERS,
    CONTENT_INDEX,
    DONE_EVENTS,
    REASONING_EVENTS,
    USAGE,
    LAST_OUTPUT,
    ITEM_STATUS,
    ITEM_IDS,
)
