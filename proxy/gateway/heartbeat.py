"""Signs of life on a stream that is silent, so that no load balancer gives it up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import TracebackType

    from proxy.gateway.body_writer import BodyWriter

__all__ = ["Heartbeat"]

_COMMENT = b": keep-alive\n\n"
# openai-python trips over a blank line behind an id: it would dispatch an event without data.
_COMMENT_AFTER_ID = b": keep-alive\n"
_EVENT = b'event: keepalive\ndata: {"type":"keepalive"}\n\n'


class Pulse(Protocol):
    """What a heartbeat asks of a stream; a corrector tells it."""

    @property
    def between_events(self) -> bool:
        """Whether what was sent so far ends with a whole event."""

    @property
    def ended(self) -> bool:
        """Whether the terminal event has come."""

    @property
    def response_id(self) -> str | None:
        """The id of the response, once an event has told it."""

    has_ids: bool
    """Whether an event may have had an ``id:`` field."""


class Heartbeat:
    """While the ``with`` block runs, write a heartbeat after every ``every_s`` without a write.

    Never inside an event, never behind the terminal one, never to a client that is full.  Kind
    ``event`` waits for ``response.created``.  With ``every_s`` 0 nothing happens.
    """

    def __init__(self, writer: BodyWriter, pulse: Pulse, *, every_s: float, kind: str) -> None:
        self._writer = writer
        self._pulse = pulse
        self._every_s = every_s
        self._kind = kind
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        """Begin to watch the stream."""
        if self._every_s:
            self._writer.written_at = self._loop.time()
            self._timer = self._loop.call_later(self._every_s, self._check)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        due = self._writer.written_at + self._every_s
        now = self._loop.time()
        if due <= now:
            if self._may_beat():
                self._writer.write(self._beat())
            due = now + self._every_s
        self._timer = self._loop.call_at(due, self._check)

    def _may_beat(self) -> bool:
        pulse = self._pulse
        return (
            pulse.between_events
            and not pulse.ended
            and not self._writer.paused
            and (self._kind == "comment" or pulse.response_id is not None)
        )

    def _beat(self) -> bytes:
        if self._kind == "event":
            return _EVENT
        return _COMMENT_AFTER_ID if self._pulse.has_ids else _COMMENT
