"""The terminal rule alone, on a recorded stream."""

from __future__ import annotations

import re

from proxy.core.event_stream import EventStreamDecoder, Fragment
from proxy.core.responses import judge, may_be_terminal

__all__ = ["fix_stream"]

_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})\r\n")
_NO_LIMIT = 2**63
_LINE_ENDS = (b"\r\n\r\n", b"\n\n")


def fix_stream(data: bytes) -> tuple[bytes, list[str]]:
    """Return the stream with its terminal events' names corrected, and what was changed.

    A leading HTTP head, as in a capture, is kept.  A body that is still in HTTP chunks is
    taken out of them, since their sizes would no longer be true.  Nothing of the stream is
    invented, completed or removed.
    """
    head, body = _split_head(data)
    body, chunked = _unchunk(body)
    decoder = EventStreamDecoder(_NO_LIMIT, keep_bom=True)
    out = [head]
    changes: list[str] = ["HTTP chunk framing left out"] if chunked else []
    for block in decoder.feed(body):
        terminal = (
            judge(block) if not isinstance(block, Fragment) and may_be_terminal(block) else None
        )
        if terminal is None:
            out.append(block)
            continue
        out.append(terminal.raw)
        number = terminal.payload.sequence_number if terminal.payload else None
        place = f"event {number}" if number is not None else "an event"
        if terminal.corrected:
            changes.append(f"{place}: {terminal.says} -> {terminal.name} ({terminal.status})")
        elif terminal.contradiction:
            changes.append(f"{place}: says {terminal.says}, its status is {terminal.status}: left")
    out.append(decoder.take_rest())
    return b"".join(out), changes


def _split_head(data: bytes) -> tuple[bytes, bytes]:
    """Split a capture's HTTP head from its body; a bare stream has none."""
    if not data.startswith(b"HTTP/"):
        return b"", data
    ends = [place + len(end) for end in _LINE_ENDS if (place := data.find(end)) >= 0]
    cut = min(ends, default=len(data))
    return data[:cut], data[cut:]


def _unchunk(body: bytes) -> tuple[bytes, bool]:
    """Take a body out of its HTTP chunks, if it is in some (RFC 9112, section 7.1)."""
    pieces: list[bytes] = []
    position = 0
    while match := _CHUNK_SIZE.match(body, position):
        size = int(match[1], 16)
        begin = match.end()
        pieces.append(body[begin : begin + size])
        position = begin + size + len(b"\r\n")
    return (b"".join(pieces), True) if pieces else (body, False)
