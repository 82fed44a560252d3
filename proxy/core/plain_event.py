"""Most events of a stream, read in one look: deltas and the like, which say nothing of its life.

A stream is thousands of deltas between a few events that matter. Such an event, in the shape that
vLLM writes, is known by its payload's parsed top level alone, at the cost of half a microsecond;
whatever has another shape is left to ``parse_event`` and ``judge``, which take any.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from proxy.core.http_chunk import TAIL_BYTES, data_size

__all__ = [
    "LOOKED_AT",
    "NO_NUMBER",
    "PLAIN_BYTES",
    "Leads",
    "decode_members",
    "lead_of",
    "plain_number",
]

NO_NUMBER: Final = -(2**63)  # no stream numbers so
PLAIN_BYTES: Final = 64 * 1024
"""The length up to which a look pays: what is longer is rare, and a copy of it not cheap."""

_DATA: Final = b"\ndata: "
_TAIL: Final = b"\n\n\r\n"
_CR: Final = b"\r"[0]
LOOKED_AT: Final = frozenset(
    {
        "",
        "error",
        "response.completed",
        "response.failed",
        "response.incomplete",
        "response.output_item.done",
    }
)
"""What is known by its type to matter: the end, errors, finished items, and no type at all."""

Leads = dict[int, tuple[bytes, int, int]]
"""By an HTTP chunk's length: what stands before its event's JSON; how long JSON and event are."""

_LONGEST_LEAD: Final = 128


class _Members(msgspec.Struct, gc=False):
    type: str = ""
    sequence_number: int = NO_NUMBER
    # What tells of the response is left to the thorough look: anything but null is refused.
    response: None = None
    error: None = None


decode_members = msgspec.json.Decoder(_Members).decode


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
        members = decode_members(block[begin + 7 : end])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return None if members.type in LOOKED_AT else members.sequence_number


def lead_of(http_chunk: bytes) -> Leads | None:
    """Learn how an event stands in an HTTP chunk of its own; None if this one holds none.

    Streams hold long runs of events of one name, so what stands before their JSON is the same but
    for the chunk's size. The table that is returned has an entry for this chunk's length.
    """
    size = data_size(http_chunk)
    begin = len(http_chunk) - size - TAIL_BYTES
    end = http_chunk.find(_DATA, begin) + len(_DATA)
    lead = http_chunk[begin:end]
    if (
        not lead.startswith(b"event: ")
        or len(lead) > _LONGEST_LEAD
        or lead.count(b"\n") != 1
        or _CR in lead
    ):
        return None
    leads = _leads(lead)
    leads[len(http_chunk)] = http_chunk[:end], len(http_chunk) - end - len(_TAIL), size
    return leads


@lru_cache(maxsize=16)  # more names than vLLM has for what it sends often
def _leads(_: bytes) -> Leads:
    return {}
