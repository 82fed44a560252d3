"""How far a stream is, and what it has told of its response."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from proxy.core.event import parse_event
from proxy.core.responses import Terminal, is_done_marker

if TYPE_CHECKING:
    from proxy.core.look import Look
    from proxy.core.responses import Payload

__all__ = ["Progress", "Seen"]


class Seen(msgspec.Struct, frozen=True, gc=False):
    """One block as it is to be sent, its own sequence number, and whether it is a plain event.

    A plain event is neither terminal nor an error and holds no response object and no finished
    item; see ``plain_number``.
    """

    raw: bytes
    number: int | None = None
    plain: bool = False


class Progress:
    """How far a stream is, and what it has told of its response.

    ``events`` counts those that came, ``dropped_events`` those behind the terminal one that are not
    sent; ``done`` is whether ``[DONE]`` has come, ``has_ids`` whether an event had an ``id`` field,
    ``contradiction`` whether the terminal event says completed and its payload does not.
    """

    __slots__ = (
        "_error",
        "_snapshot",
        "contradiction",
        "done",
        "dropped_events",
        "events",
        "has_ids",
        "last_sequence_number",
        "terminal",
    )

    def __init__(self) -> None:
        self._snapshot: Payload | None = None
        self._error: Payload | None = None
        self.terminal: Terminal | None = None
        self.contradiction = False
        self.done = False
        self.events = 0
        self.last_sequence_number: int | None = None  # of the last event that has one
        self.dropped_events = 0
        self.has_ids = False

    @property
    def ended(self) -> bool:
        """Whether the terminal event has come."""
        return self.terminal is not None

    @property
    def corrected(self) -> bool:
        """Whether the terminal event came under a wrong name."""
        return self.terminal is not None and self.terminal.corrected

    @property
    def response_id(self) -> str | None:
        """The id of the response, once an event has told it."""
        return self._snapshot.response_id if self._snapshot else None

    @property
    def model(self) -> str | None:
        """The model's name, once an event has told it."""
        return self._snapshot.model if self._snapshot else None

    @property
    def status(self) -> str | None:
        """The status that the last response object says."""
        return self._snapshot.status if self._snapshot else None

    @property
    def response(self) -> bytes | None:
        """The text of the response object last seen, or None before ``response.created``."""
        return self._snapshot.response() if self._snapshot is not None else None

    # For the corrector.

    def _end_with(self, terminal: Terminal) -> Seen:
        self.events += 1
        self.terminal = terminal
        self.contradiction = terminal.contradiction
        payload = terminal.payload
        if payload is not None and payload.has_response:
            self._snapshot = payload
        return Seen(terminal.raw, self._note_number(payload))

    def _note(self, looked: Look) -> Seen:
        """Remember what a block that is not terminal says of the response, and pass it."""
        block, _, event, payload = looked
        if event is None:
            return Seen(block)
        if event.has_id:
            self.has_ids = True
        if not event.data:
            return Seen(block)
        self.events += 1
        if payload is None:
            return Seen(block)
        if payload.has_response:
            self._snapshot = payload
        elif (payload.type or (event.name_value or b"").decode("utf-8", "replace")) == "error":
            self._error = payload
        return Seen(block, self._note_number(payload))

    def _note_number(self, payload: Payload | None) -> int | None:
        number = payload.sequence_number if payload is not None else None
        if number is not None:
            self.last_sequence_number = number
        return number

    def _take_after_end(self, block: bytes) -> Seen | None:
        event = parse_event(block)
        if not event.data:
            return Seen(block)
        if is_done_marker(event):
            self.done = True
            return Seen(block)
        self.dropped_events += 1
        return None
