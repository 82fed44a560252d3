"""Most events of a stream, read in one look: deltas and the like, which say nothing of its life.

A stream is thousands of deltas between a few events that matter. Such an event, in the shape that
vLLM writes, is known by its payload's parsed top level alone, at the cost of half a microsecond;
whatever has another shape is left to ``parse_event`` and ``judge``, which take any.
"""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["NO_NUMBER", "PLAIN_BYTES", "plain_number"]

NO_NUMBER: Final = -(2**63)  # no stream numbers so
PLAIN_BYTES: Final = 64 * 1024
"""The length up to which a look pays: what is longer is rare, and a copy of it not cheap."""

_DATA: Final = b"\ndata: "
_CR: Final = b"\r"[0]
# What is known by its type to matter: the end, errors, items that are done, and no type at all.
_LOOKED_AT: Final = frozenset(
    {
        "",
        "error",
        "response.completed",
        "response.failed",
        "response.incomplete",
        "response.output_item.done",
    }
)


class _Members(msgspec.Struct, gc=False):
    type: str = ""
    sequence_number: int = NO_NUMBER
    # What tells of the response is left to the thorough look: anything but null is refused.
    response: None = None
    error: None = None


_decode = msgspec.json.Decoder(_Members).decode


def plain_number(block: bytes) -> int | None:
    """Return the sequence number of a plain event, ``NO_NUMBER`` if it has none.

    None says that ``block`` must be looked at, and nothing else: it may be terminal, an error,
    hold a response object or a finished item, be no event, several events or a part of one, or
    merely be written in another way than ``event: NAME``, ``data: JSON`` and a blank line, each
    ended by one LF. ``block`` should not be longer than ``PLAIN_BYTES``.
    """
    begin = block.find(_DATA)
    end = block.find(b"\n", begin + 7)
    if (
        begin < 0
        or block[end:] != b"\n\n"
        or block[:7] != b"event: "
        or block.find(b"\n", 0, begin) >= 0
        or _CR in block
    ):
        return None
    try:
        if not block.isascii():
            block.decode()  # msgspec does not look into the strings that it skips
        members = _decode(block[begin + 7 : end])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return None if members.type in _LOOKED_AT else members.sequence_number
