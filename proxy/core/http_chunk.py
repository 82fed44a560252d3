"""One HTTP chunk as it stands on the wire, framing included (RFC 9112, section 7.1).

Servers send each event as a chunk of its own, and most reads bring exactly one. Where that is
known, the chunk can be sent on as it is: nobody has to parse it, and nobody to frame it anew.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

__all__ = ["LARGEST_BYTES", "TAIL_BYTES", "data_size"]

LARGEST_BYTES: Final = 2048
"""The length up to which chunks are known so; longer ones are rare, and their parser cheap."""
TAIL_BYTES: Final = 2
"""What stands behind a chunk's data: CR LF."""


def data_size(read: bytes) -> int:
    """Return how many bytes of data ``read`` holds if it is exactly one chunk; 0 if it is not.

    Only chunks are known whose size is written as Python, nginx and most others write it: in lower
    case, without leading zeros and extensions. What is not known may be a chunk all the same.
    """
    line, size = _framing(min(len(read), LARGEST_BYTES + 1))
    # Either both are there or the length tells: neither is as long as the other.
    return size if len(read.removeprefix(line).removesuffix(b"\r\n")) == size else 0


@lru_cache(maxsize=LARGEST_BYTES + 2)
def _framing(length: int) -> tuple[bytes, int]:
    """Return the first line of a chunk of so many bytes in all, and how many are its data.

    Where there is no such chunk, no read holds so few bytes of data.
    """
    if length <= LARGEST_BYTES:
        for digits in (1, 2, 3):
            size = length - digits - 2 - TAIL_BYTES
            if size > 0 and len(line := b"%x\r\n" % size) == digits + 2:
                return line, size
    return b"", -1
