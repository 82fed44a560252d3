"""Bytes of an event stream to whole events, without losing a byte.

The grammar is WHATWG HTML, section 9.2.5 and 9.2.6, on bytes: lines end in LF, CRLF or CR,
a blank line ends an event.  Everything here keeps the bytes as they came: an event is its
raw block, blank line included, and what a field means is found by spans into that block.

Decoding is two steps, as the standard has it: ``EventStreamDecoder`` cuts chunks into
blocks, ``parse_event`` (``event.py``) finds the fields of one block.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from proxy.core.event import LINE_END

if TYPE_CHECKING:
    from proxy.core.held_bytes import Share

__all__ = ["EventStreamDecoder", "Fragment"]

BOM = b"\xef\xbb\xbf"

# A line's end and a blank line's end behind it.  A CR before an LF must not match alone,
# or every CRLF would be two line ends.
_BLANK_LINE = re.compile(rb"(?:\r\n|\r(?!\n)|\n)(?:\r\n?|\n)")
_LINES_ONE_BY_ONE = 8
_LF, _CR = b"\n\r"
LARGE_BYTES: Final = 256 * 1024
"""A block of this length takes about a millisecond: more than others should wait for."""
# A half event is put to account when it is longer than this, and then in steps of as much.
_ACCOUNT_STEP_BYTES = 64 * 1024


class Fragment(bytes):
    """A piece of an event that is longer than the limit: to be passed on, not to be judged."""

    __slots__ = ()


class EventStreamDecoder:
    """Cut the chunks of one event stream into blocks that each end with their blank line.

    A block is whole at its blank line's CR; an LF that comes directly after belongs to it and
    is returned as a block of its own if it comes later.  A BOM at the start is dropped unless
    ``keep_bom``.  An event longer than ``max_event_bytes``, or than ``share`` has room for, comes
    out as ``Fragment`` pieces, so what is held never grows past the limit plus one chunk.
    ``take_rest`` gives the share back.

    ``plain`` tells whether a chunk of whole LF-ended blocks may bypass ``feed`` without harm.
    """

    __slots__ = (
        "_after_cr",
        "_buffer",
        "_has_cr",
        "_in_fragments",
        "_look_at",
        "_max_event_bytes",
        "_scanned",
        "_share",
        "_start",
        "overlong_events",
        "plain",
    )

    def __init__(
        self,
        max_event_bytes: int = 64 * 1024 * 1024,
        *,
        keep_bom: bool = False,
        share: Share | None = None,
    ) -> None:
        self._buffer = bytearray()
        self._scanned = 0  # no blank line ends before this place of the buffer
        self._has_cr = False
        self._after_cr = False  # the last block ended in a CR: an LF may follow
        self._start = not keep_bom
        self._max_event_bytes = max_event_bytes
        self._share = share
        self._look_at = self._first_look  # a longer buffer asks whether it may be held
        self._in_fragments = False
        self.overlong_events = 0
        self.plain = keep_bom

    @property
    def rest(self) -> bytes:
        """The bytes of the block that has not ended yet."""
        return bytes(self._buffer)

    @property
    def in_fragments(self) -> bool:
        """Whether an over-long event was handed out in part and has not ended yet."""
        return self._in_fragments

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the blocks that ``chunk`` completes, in order, each with its blank line."""
        blocks = self.cut(chunk)
        return [block if isinstance(block, bytes) else bytes(block) for block in blocks]

    def cut(self, chunk: bytes) -> list[bytes | bytearray]:
        """Do what ``feed`` does, and hand a large block over in the buffer that has gathered it.

        That is a copy less, which for 16 MB takes longer than others should wait for.
        """
        blocks = self._feed(chunk)
        self.plain = not (self._buffer or self._in_fragments or self._start or self._after_cr)
        return blocks

    def _feed(self, chunk: bytes) -> list[bytes | bytearray]:
        blocks: list[bytes | bytearray] = []
        buffer = self._buffer
        buffer += chunk
        if self._start and not self._drop_bom():
            return blocks
        if self._after_cr and buffer:
            self._after_cr = False
            if buffer[0] == _LF:
                blocks.append(b"\n")
                del buffer[0]
        if not self._has_cr:
            self._has_cr = b"\r" in chunk
        begin = 0
        while (end := self._find_end(begin)) >= 0:
            blocks.append(self._block(begin, end))
            begin = end
        if begin:
            self._drop_read(begin, blocks[-1])
        # A blank line may begin in the last three bytes: LF, or CR LF CR.
        self._scanned = max(0, len(self._buffer) - 3)
        if len(self._buffer) > self._look_at and not self._may_hold():
            blocks.append(self._take_fragment())
        return blocks

    def take_rest(self) -> bytes:
        """Return what is left at the end of the stream and forget it."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._scanned = 0
        self._let_go()
        self.plain = not (self._in_fragments or self._start or self._after_cr)
        return rest

    @property
    def _first_look(self) -> int:
        if self._share is None:
            return self._max_event_bytes
        return min(self._max_event_bytes, _ACCOUNT_STEP_BYTES)

    def _may_hold(self) -> bool:
        """Whether the half event may be held: it is short enough, and the account has room."""
        size, share = len(self._buffer), self._share
        if self._in_fragments or share is None or size > self._max_event_bytes:
            return False
        wanted = min(size + _ACCOUNT_STEP_BYTES, self._max_event_bytes)
        if not share.ask(wanted - share.size):
            return False
        self._look_at = wanted
        return True

    def _let_go(self) -> None:
        """Give back what a half event had of the account."""
        if self._share is not None:
            self._share.close()
        self._look_at = self._first_look

    def _block(self, begin: int, end: int) -> bytes | bytearray:
        """Return the block that stands there: the buffer itself if it is large and all there is."""
        buffer = self._buffer
        if self._in_fragments:
            self._in_fragments = False
            return Fragment(memoryview(buffer)[begin:end])
        if end - begin > self._max_event_bytes:  # however few reads it came in
            self.overlong_events += 1
            return Fragment(memoryview(buffer)[begin:end])
        if end - begin >= LARGE_BYTES and end - begin == len(buffer):
            return buffer
        return bytes(memoryview(buffer)[begin:end])

    def _drop_read(self, end: int, last: bytes | bytearray) -> None:
        """Drop from the buffer the blocks that were handed out, which end there."""
        if last is self._buffer:
            self._buffer = bytearray()
        else:
            del self._buffer[:end]
        buffer = self._buffer
        self._after_cr = not buffer and last.endswith(b"\r")
        self._has_cr = b"\r" in buffer
        if self._share is not None and self._share.size:
            self._let_go()

    def _drop_bom(self) -> bool:
        """Drop a BOM at the very start; False while too few bytes came to tell."""
        buffer = self._buffer
        if len(buffer) < len(BOM) and BOM.startswith(buffer):
            return False
        if buffer.startswith(BOM):
            del buffer[: len(BOM)]
        self._start = False
        return True

    def _find_end(self, begin: int) -> int:
        """Tell where the block that begins at ``begin`` ends, or -1."""
        buffer = self._buffer
        if begin < len(buffer) and buffer[begin] in (_LF, _CR) and not self._in_fragments:
            match = LINE_END.match(buffer, begin)
            return match.end() if match else -1
        scan = max(begin, self._scanned)
        if not self._has_cr:
            return _end_of_lines(buffer, scan)
        match = _BLANK_LINE.search(buffer, scan)
        return match.end() if match else -1

    def _take_fragment(self) -> Fragment:
        """Hand out an over-long event's bytes so far, but for those that may begin its end."""
        buffer = self._buffer
        if not self._in_fragments:
            self._in_fragments = True
            self.overlong_events += 1
            self._let_go()
        keep = 3
        piece = Fragment(memoryview(buffer)[:-keep])
        del buffer[:-keep]
        self._scanned = 0
        return piece


def _end_of_lines(buffer: bytearray, scan: int) -> int:
    """Tell where the first blank line from ``scan`` on ends, all lines ending in LF; -1 if none.

    A search for one byte is thirty times as fast as one for two, and a large event may be one
    line: so the first lines are looked at one by one.
    """
    for _ in range(_LINES_ONE_BY_ONE):
        scan = buffer.find(b"\n", scan)
        if scan < 0 or buffer[scan + 1 : scan + 2] == b"\n":
            return scan + 2 if scan >= 0 else -1
        scan += 1
    found = buffer.find(b"\n\n", scan)
    return found + 2 if found >= 0 else -1
