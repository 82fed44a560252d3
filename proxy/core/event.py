"""What one whole block of an event stream says: its fields, found by spans into its bytes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Event", "encode_event", "fields", "parse_event"]

LINE_END = re.compile(rb"\r\n?|\n")
_COLON, _SPACE = b": "


class Event(NamedTuple):
    """One block and where its fields stand in it.

    ``name`` is the span of the last ``event`` field's value, if there is one; ``data`` the
    spans of the ``data`` fields' values in order; ``has_id`` whether an ``id`` field is there.
    A block without data dispatches nothing.
    """

    raw: bytes
    name: tuple[int, int] | None
    data: tuple[tuple[int, int], ...]
    has_id: bool

    @property
    def name_value(self) -> bytes | None:
        """The event's name as its field says, or None."""
        return self.raw[self.name[0] : self.name[1]] if self.name else None

    def payload(self) -> bytes:
        """Return the data as a client reads it: the values of all lines, joined by LF."""
        if len(self.data) == 1:
            begin, end = self.data[0]
            return self.raw[begin:end]
        return b"\n".join(self.raw[begin:end] for begin, end in self.data)

    def place(self, offset: int) -> int:
        """Tell where in the block the byte stands that has this offset in ``payload()``."""
        for begin, end in self.data:
            if offset <= end - begin:
                return begin + offset
            offset -= end - begin + 1
        raise IndexError("the offset lies behind the payload")


def fields(block: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield each field of a block as (name, begin, end) of its value; comments are left out.

    Section 9.2.6: the first colon separates, one space after it is not part of the value, a
    line without a colon is a field with an empty value.
    """
    has_cr = b"\r" in block
    begin = 0
    size = len(block)
    while begin < size:
        if has_cr:
            match = LINE_END.search(block, begin)
            end, following = match.span() if match else (size, size)
        else:
            end = block.find(b"\n", begin)
            end = size if end < 0 else end
            following = end + 1
        if end > begin and block[begin] != _COLON:
            colon = block.find(b":", begin, end)
            if colon < 0:
                yield block[begin:end], end, end
            else:
                value = colon + 1
                if value < end and block[value] == _SPACE:
                    value += 1
                yield block[begin:colon], value, end
        begin = following


def parse_event(block: bytes) -> Event:
    """Find the fields of one block that matter to a relay."""
    name: tuple[int, int] | None = None
    data: list[tuple[int, int]] = []
    has_id = False
    for field, begin, end in fields(block):
        if field == b"data":
            data.append((begin, end))
        elif field == b"event":
            name = (begin, end)
        elif field == b"id":
            has_id = True
    return Event(block, name, tuple(data), has_id)


def encode_event(name: bytes, payload: bytes) -> bytes:
    """Write an event as vLLM does; a payload of several lines becomes several data lines."""
    lines = payload.replace(b"\n", b"\ndata: ")
    return b"event: %b\ndata: %b\n\n" % (name, lines)
