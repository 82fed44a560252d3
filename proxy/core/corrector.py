"""One stream's life: chunks in, whole events out, the last one under its right name."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from proxy.core.event import encode_event
from proxy.core.event_stream import EventStreamDecoder, Fragment
from proxy.core.failure import blame, failed_event
from proxy.core.http_chunk import LARGEST_BYTES
from proxy.core.look import look
from proxy.core.plain_event import (
    LOOKED_AT,
    NO_NUMBER,
    PLAIN_BYTES,
    decode_members,
    lead_of,
    plain_number,
)
from proxy.core.progress import Progress, Seen
from proxy.core.responses import judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.core.held_bytes import Share
    from proxy.core.look import Look
    from proxy.core.plain_event import Leads

__all__ = ["Corrector", "Mode"]

_LF, _CR = b"\n\r"


class Mode(StrEnum):
    """What is done with a stream: corrected, only looked at, or not even that."""

    ON = "on"
    OBSERVE = "observe"
    OFF = "off"


class Corrector(Progress):
    """Correct one event stream: feed it chunks, send what it returns, finish it.

    ``feed`` returns whole events only, joined as they came together.  After the terminal
    event only ``[DONE]``, comments and blank lines pass: clients wait for the end of the
    body and are confused by further events.  With ``Mode.OBSERVE`` the same is seen and
    counted, and the bytes pass as they came.  A long half event asks ``share`` for room, and passes
    in parts where there is none; ``close`` gives the share back.
    """

    __slots__ = (
        "_decoder",
        "_leads",
        "_max_plain_bytes",
        "_observe",
        "_quick",
    )

    def __init__(
        self,
        mode: Mode = Mode.ON,
        *,
        max_event_bytes: int = 64 * 1024 * 1024,
        share: Share | None = None,
    ) -> None:
        super().__init__()
        self._observe = mode is not Mode.ON
        self._decoder = EventStreamDecoder(max_event_bytes, share=share)
        self._max_plain_bytes = min(max_event_bytes, PLAIN_BYTES)
        self._leads: Leads = {}
        self._quick = False  # whether the next chunk may be one plain event

    @property
    def overlong_events(self) -> int:
        """How many events were longer than may be held and passed unjudged."""
        return self._decoder.overlong_events

    @property
    def between_events(self) -> bool:
        """Whether what was sent so far ends with a whole event."""
        return not self._decoder.in_fragments

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
        return self.take_blocks(self.cut(chunk))

    def cut(self, chunk: bytes) -> list[bytes | bytearray]:
        """Cut whole blocks, the first half of ``feed``; ``take_blocks`` must have them next.

        A large one may come in the buffer that has gathered it.
        """
        self._quick = False
        return self._decoder.cut(chunk)

    def take_blocks(
        self, blocks: list[bytes | bytearray], looks: list[Look | None] | None = None
    ) -> list[Seen]:
        """Take the blocks that ``cut`` has cut and return what is to be sent.

        ``looks`` are what ``look`` found in them, where the caller has looked already.
        """
        found: Sequence[Look | None] = looks or [None] * len(blocks)
        seen = [
            one
            for block, looked in zip(blocks, found, strict=True)
            if (one := self._take(block, looked)) is not None
        ]
        self._quick = self._decoder.plain and self.terminal is None
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
        return self._end("failed", *blame(self._error, "server_error", message))

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
        block = failed_event(
            response, status=status, code=code, message=message, after=self.last_sequence_number
        )
        # An over-long event that was handed out in part must not swallow this one.
        lead = b"\n\n" if self._decoder.in_fragments else b""
        self._decoder.take_rest()
        self._quick = False
        self._take(block)
        return lead + block

    def _take(self, block: bytes | bytearray, looked: Look | None = None) -> Seen | None:
        """Take one block and return it as it is to be sent; None if it is not."""
        if not isinstance(block, bytes):
            block = bytes(block) if looked is None else looked.raw
        if isinstance(block, Fragment):
            return Seen(block)
        if self.terminal is not None:
            return self._take_after_end(block)
        if looked is None:
            number = plain_number(block) if len(block) <= self._max_plain_bytes else None
            if number is not None:
                self.events += 1
                if number == NO_NUMBER:
                    return Seen(block, plain=True)
                self.last_sequence_number = number
                return Seen(block, number, plain=True)
            looked = look(block)
        if looked.terminal is not None:
            return self._end_with(looked.terminal)
        return self._note(looked)
