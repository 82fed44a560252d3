"""One stream's life: chunks in, whole events out, the last one under its right name."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from proxy.core.event_stream import EventStreamDecoder, Fragment, encode_event, parse_event
from proxy.core.http_chunk import LARGEST_BYTES
from proxy.core.json_edit import decode_string, set_member
from proxy.core.plain_event import (
    LOOKED_AT,
    NO_NUMBER,
    PLAIN_BYTES,
    decode_members,
    lead_of,
    plain_number,
)
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
    from proxy.core.plain_event import Leads
    from proxy.core.responses import Payload

__all__ = ["Corrector", "Mode", "Seen"]

_LF, _CR = b"\n\r"


class Mode(StrEnum):
    """What is done with a stream: corrected, only looked at, or not even that."""

    ON = "on"
    OBSERVE = "observe"
    OFF = "off"


class Seen(msgspec.Struct, frozen=True, gc=False):
    """One block as it is to be sent, its own sequence number, and whether it is a plain event.

    A plain event is neither terminal nor an error and holds no response object and no finished
    item; see ``plain_number``.
    """

    raw: bytes
    number: int | None = None
    plain: bool = False


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
        "_leads",
        "_max_plain_bytes",
        "_observe",
        "_quick",
        "_snapshot",
        "contradiction",
        "done",
        "dropped_events",
        "events",
        "has_ids",
        "last_sequence_number",
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
        self._max_plain_bytes = min(max_event_bytes, PLAIN_BYTES)
        self._leads: Leads = {}
        self._quick = False  # whether the next chunk may be one plain event
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
        return self._snapshot.response() if self._snapshot is not None else None

    def take_plain(self, chunk: bytes) -> int | None:
        """Take a chunk that is one plain event, as most are: it is to be sent as it is.

        Returns its sequence number, ``NO_NUMBER`` if it has none.  None says that nothing was
        taken: the chunk is for ``feed`` or ``feed_blocks``.
        """
        if not self._quick or len(chunk) > self._max_plain_bytes:
            return None
        number = plain_number(chunk)
        if number is not None:
            self.events += 1
            if number != NO_NUMBER:
                self.last_sequence_number = number
        return number

    def take_http_chunk(self, http_chunk: bytes) -> int:
        """Take a read of an HTTP body that is one chunk, which is one plain event with a number.

        Most reads are: such a chunk is to be sent on as it is, framing included. Returns how long
        the event is, behind which the chunk's CR LF stands; its number is ``last_sequence_number``.
        0 says that nothing was taken: the read is for an HTTP parser.
        """
        if not self._quick:
            return 0
        known = self._leads.get(len(http_chunk))
        if known is None:
            return self._learn(http_chunk)
        lead, text_size, size = known
        # One call each for the look and the copy: what is done here is done for every event.
        text = http_chunk.removeprefix(lead).removesuffix(b"\n\n\r\n")
        if len(text) != text_size:
            return self._learn(http_chunk)
        if _LF in text or _CR in text:
            return 0
        try:
            if not text.isascii():
                text.decode()  # msgspec does not look into the strings that it skips
            members = decode_members(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return 0
        number = members.sequence_number
        if number == NO_NUMBER or members.type in LOOKED_AT:
            return 0
        self.events += 1
        self.last_sequence_number = number
        return size

    def feed(self, chunk: bytes) -> bytes:
        """Take what upstream sent and return what is to be sent: whole events, maybe none."""
        if self.take_plain(chunk) is not None:
            return chunk
        seen = self.feed_blocks(chunk)
        return chunk if self._observe else b"".join([one.raw for one in seen])

    def feed_blocks(self, chunk: bytes) -> list[Seen]:
        """Do what ``feed`` does and return block by block what is to be sent."""
        decoder = self._decoder
        seen = [one for block in decoder.feed(chunk) if (one := self._take(block)) is not None]
        self._quick = decoder.plain and self.terminal is None
        return seen

    def finish(self) -> bytes:
        """Take the end of upstream's body and return what is to be sent before ours.

        An event without its blank line is completed if it is terminal and its JSON whole;
        behind the terminal event the rest passes as it came, anything else is dropped: no
        client would dispatch it.
        """
        self._quick = False
        rest = self._decoder.take_rest()
        if not rest or self._observe:
            return b""
        if self.terminal is not None:
            seen = self._take_after_end(rest)
            return seen.raw if seen is not None else b""
        ending = b"\r\n" if b"\r\n" in rest else b"\r" if rest.endswith(b"\r") else b"\n"
        block = rest + (ending if rest.endswith((b"\n", b"\r")) else ending * 2)
        terminal = judge(block)
        if terminal is None or terminal.payload is None:
            return b""
        return self._end_with(terminal).raw

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

    def _learn(self, http_chunk: bytes) -> int:
        """Learn what the next chunks may look like; this one goes the long way."""
        leads = lead_of(http_chunk)
        if leads is not None and self._max_plain_bytes >= LARGEST_BYTES:
            self._leads = leads
        return 0

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

    def _take(self, block: bytes) -> Seen | None:
        """Look at one block and return it as it is to be sent; None if it is not."""
        if isinstance(block, Fragment):
            return Seen(block)
        if self.terminal is not None:
            return self._take_after_end(block)
        number = plain_number(block) if len(block) <= self._max_plain_bytes else None
        if number is not None:
            self.events += 1
            if number == NO_NUMBER:
                return Seen(block, plain=True)
            self.last_sequence_number = number
            return Seen(block, number, plain=True)
        terminal = judge(block) if may_be_terminal(block) else None
        return self._end_with(terminal) if terminal is not None else self._look_at(block)

    def _end_with(self, terminal: Terminal) -> Seen:
        self.events += 1
        self._quick = False
        self.terminal = terminal
        self.contradiction = terminal.contradiction
        payload = terminal.payload
        if payload is not None and payload.has_response:
            self._snapshot = payload
        return Seen(terminal.raw, self._note_number(payload))

    def _look_at(self, block: bytes) -> Seen:
        """Remember what a block that is not terminal says of the response, and pass it."""
        event = parse_event(block)
        if event.has_id:
            self.has_ids = True
        if not event.data:
            return Seen(block)
        self.events += 1
        payload = read_payload(event.payload())
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
