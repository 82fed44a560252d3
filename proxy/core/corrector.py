"""One stream's life: chunks in, whole events out, the last one under its right name."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from proxy.core.event_stream import EventStreamDecoder, Fragment, encode_event, parse_event
from proxy.core.json_edit import decode_string, set_member
from proxy.core.responses import (
    FAILED,
    Terminal,
    is_done_marker,
    judge,
    may_be_terminal,
    read_payload,
)

if TYPE_CHECKING:
    from proxy.core.held_bytes import Share
    from proxy.core.responses import Payload

__all__ = ["Corrector", "Mode"]


_CR = b"\r"[0]
_BACKSLASH = b"\\"[0]
_BEGINNINGS = frozenset({b"event", b"data:"})


def _is_harmless(block: bytes) -> bool:
    """Tell cheaply, and never wrongly with True, that blocks hold nothing to be looked at.

    Such are a terminal event, a response object, an error, an id, a CR.  ``find`` and not ``in``:
    CPython tries what stands left of ``in`` as a number first, which costs ten times the search.
    """
    return (
        _CR not in block
        and not (_BACKSLASH in block and block.find(b"\\u") >= 0)
        and block.find(b'"response"') < 0
        and block.find(b"error") < 0
        and block.find(b"complete") < 0
        and block.find(b".failed") < 0
        and block.find(b"\nid") < 0
        and block[:2] != b"id"
    )


class Mode(StrEnum):
    """What is done with a stream: corrected, only looked at, or not even that."""

    ON = "on"
    OBSERVE = "observe"
    OFF = "off"


class Corrector:
    """Correct one event stream: feed it chunks, send what it returns, finish it.

    ``feed`` returns whole events only, joined as they came together.  After the terminal
    event only ``[DONE]``, comments and blank lines pass: clients wait for the end of the
    body and are confused by further events.  With ``Mode.OBSERVE`` the same is seen and
    counted, and the bytes pass as they came.  A long half event asks ``share`` for room, and passes
    in parts where there is none; ``close`` gives the share back.
    """

    __slots__ = (
        "_decoder",
        "_error",
        "_last_numbered",
        "_observe",
        "_snapshot",
        "contradiction",
        "done",
        "dropped_events",
        "events",
        "has_ids",
        "terminal",
    )

    def __init__(
        self,
        mode: Mode = Mode.ON,
        *,
        max_event_bytes: int = 64 * 1024 * 1024,
        share: Share | None = None,
    ) -> None:
        self._observe = mode is not Mode.ON
        self._decoder = EventStreamDecoder(max_event_bytes, share=share)
        self._last_numbered = b""  # the last bytes that hold a sequence number; read when asked
        self._snapshot: Payload | None = None
        self._error: Payload | None = None
        self.terminal: Terminal | None = None
        self.contradiction = False
        self.done = False
        self.events = 0
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
    def overlong_events(self) -> int:
        """How many events were longer than may be held and passed unjudged."""
        return self._decoder.overlong_events

    @property
    def between_events(self) -> bool:
        """Whether what was sent so far ends with a whole event."""
        return not self._decoder.in_fragments

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
        if self._snapshot is None or self._snapshot.response is None:
            return None
        return bytes(self._snapshot.response)

    @property
    def last_sequence_number(self) -> int | None:
        """The number of the last event that has one."""
        decoder = EventStreamDecoder(keep_bom=True)
        for block in reversed(decoder.feed(self._last_numbered)):
            payload = read_payload(parse_event(block).payload())
            if payload is not None and payload.sequence_number is not None:
                return payload.sequence_number
        return None

    def feed(self, chunk: bytes) -> bytes:
        """Take what upstream sent and return what is to be sent: whole events, maybe none."""
        # Most chunks are one whole event that says nothing of the response: they pass as they
        # are, without a copy and without a look at their JSON.
        if (
            self.terminal is None
            and chunk[-2:] == b"\n\n"
            and _is_harmless(chunk)
            and self._decoder.plain
        ):
            self.events += chunk.count(b"\n\n")
            if chunk.rfind(b"sequence_number") >= 0:
                self._last_numbered = chunk
            return chunk
        out = b"".join(self.feed_blocks(chunk))
        return chunk if self._observe else out

    def feed_blocks(self, chunk: bytes) -> list[bytes]:
        """Do what ``feed`` does and return block by block what is to be sent."""
        if (
            self.terminal is None
            and chunk.find(b"\n\n") == len(chunk) - 2
            and chunk[:5] in _BEGINNINGS
            and _is_harmless(chunk)
            and self._decoder.plain
        ):
            return [self._take(chunk)]  # one whole event, as most chunks are
        return [out for block in self._decoder.feed(chunk) if (out := self._take(block))]

    def finish(self) -> bytes:
        """Take the end of upstream's body and return what is to be sent before ours.

        An event without its blank line is completed if it is terminal and its JSON whole;
        behind the terminal event the rest passes as it came, anything else is dropped: no
        client would dispatch it.
        """
        rest = self._decoder.take_rest()
        if not rest or self._observe:
            return b""
        if self.terminal is not None:
            return self._take_after_end(rest)
        ending = b"\r\n" if b"\r\n" in rest else b"\r" if rest.endswith(b"\r") else b"\n"
        block = rest + (ending if rest.endswith((b"\n", b"\r")) else ending * 2)
        terminal = judge(block)
        if terminal is None or terminal.payload is None:
            return b""
        return self._take(block)

    def fail(self, message: str) -> bytes:
        """End a stream that upstream did not end: return the ``response.failed`` to be sent.

        The response object is the last one seen, every byte kept but ``status`` and ``error``;
        after an upstream ``error`` event its code and message say what happened.  Empty if the
        stream has ended already or no response was created, since then nothing can fail.
        """
        return self._end("failed", *self._blame("server_error", message))

    def cancel(self) -> bytes:
        """End a stream that was cancelled: ``response.failed`` with the status ``cancelled``.

        The API has no event of its own for it, several clients hide an error that is null, and
        ``server_error`` would invite a retry.  Empty as ``fail`` is.
        """
        return self._end("cancelled", "cancelled", "The response was cancelled.")

    def resume(self, response: bytes, last_number: int) -> None:
        """Take up a stream whose events up to ``last_number`` were seen by someone else."""
        number = b"" if last_number < 0 else b',"sequence_number":%d' % last_number
        self._take(encode_event(b"resumed", b'{"response":%b%b}' % (response, number)))
        self.events = 0

    def close(self) -> None:
        """Hold nothing more of a stream that is given up; harmless when repeated."""
        self._decoder.take_rest()

    def _end(self, status: str, code: str, message: str) -> bytes:
        response = self.response
        if self.terminal is not None or response is None:
            return b""
        error = msgspec.json.encode({"code": code, "message": message})
        response = set_member(response, "status", b'"%b"' % status.encode())
        response = set_member(response, "error", error)
        number = self.last_sequence_number
        payload = b'{"response":%b,"sequence_number":%d,"type":"%b"}' % (
            response,
            0 if number is None else number + 1,
            FAILED.encode(),
        )
        # An over-long event that was handed out in part must not swallow this one.
        lead = b"\n\n" if self._decoder.in_fragments else b""
        self._decoder.take_rest()
        block = encode_event(FAILED.encode(), payload)
        self._take(block)
        return lead + block

    def _blame(self, code: str, message: str) -> tuple[str, str]:
        """Prefer what an upstream ``error`` event said to what the proxy saw."""
        if self._error is None:
            return code, message
        told = self._error
        if told.error is None:
            return told.code or code, told.message or message
        inner = read_payload(bytes(told.error))
        if inner is None:  # "error": "some words", as vLLM's 401 has it
            return code, decode_string(told.error) or message
        return inner.code or code, inner.message or message

    def _take(self, block: bytes) -> bytes:
        """Look at one block and return it as it is to be sent."""
        if isinstance(block, Fragment):
            return block
        if self.terminal is not None:
            return self._take_after_end(block)
        if block[:5] in _BEGINNINGS and _is_harmless(block) and block.find(b"data:") >= 0:
            self.events += 1
            if block.rfind(b"sequence_number") >= 0:
                self._last_numbered = block
            return block
        terminal = judge(block) if may_be_terminal(block) else None
        return self._end_with(terminal) if terminal is not None else self._look_at(block)

    def _end_with(self, terminal: Terminal) -> bytes:
        self.events += 1
        self.terminal = terminal
        self.contradiction = terminal.contradiction
        self._last_numbered = terminal.raw
        if terminal.payload is not None and terminal.payload.response is not None:
            self._snapshot = terminal.payload
        return terminal.raw

    def _look_at(self, block: bytes) -> bytes:
        """Remember what a block that is not terminal says of the response, and pass it."""
        event = parse_event(block)
        if event.has_id:
            self.has_ids = True
        if event.data:
            self.events += 1
            if b"sequence_number" in block:
                self._last_numbered = block
            if b'"response"' in block or b"error" in block or b"\\u" in block:
                self._remember(event.name_value, read_payload(event.payload()))
        return block

    def _remember(self, name: bytes | None, payload: Payload | None) -> None:
        if payload is None:
            return
        if payload.response is not None:
            self._snapshot = payload
        elif (payload.type or (name or b"").decode("utf-8", "replace")) == "error":
            self._error = payload

    def _take_after_end(self, block: bytes) -> bytes:
        event = parse_event(block)
        if not event.data:
            return block
        if is_done_marker(event):
            self.done = True
            return block
        self.dropped_events += 1
        return b""
