"""Which reads are known to be one HTTP chunk."""

from __future__ import annotations

import pytest

from proxy.core.http_chunk import LARGEST_BYTES, data_size


def test_every_size() -> None:
    """A whole chunk is known up to the limit, and nothing that is a byte more or less than one."""
    for size in range(1, LARGEST_BYTES + 20):
        chunk = b"%x\r\n%b\r\n" % (size, b"a" * size)
        assert data_size(chunk) == (size if len(chunk) <= LARGEST_BYTES else 0)
        for other in (chunk[:-1], chunk[1:], chunk + b"a", b"0" + chunk, chunk[:-2] + b"aa"):
            assert data_size(other) == 0


@pytest.mark.parametrize(
    "read",
    [
        b"",
        b"\r\n",
        b"0\r\n\r\n",
        b"1\r\na\r\n1\r\nb\r\n",
        b"C\r\n" + b"a" * 12 + b"\r\n",
        b"c \r\n" + b"a" * 12 + b"\r\n",
        b"c;x=1\r\n" + b"a" * 12 + b"\r\n",
        b"c\n" + b"a" * 12 + b"\r\n",
        b"c\r\n" + b"a" * 12 + b"\n\n",
        b"0c\r\n" + b"a" * 12 + b"\r\n",
        b"+c\r\n" + b"a" * 12 + b"\r\n",
        b"d\r\n" + b"a" * 12 + b"\r\n",
        b"a" * 21,  # no chunk has so many bytes
        b"\r\n" * 10,
    ],
)
def test_what_is_left_to_a_parser(read: bytes) -> None:
    """The last chunk, several, other spellings of a size, and what is none."""
    assert data_size(read) == 0


def test_data_may_be_anything() -> None:
    """Also what looks like another chunk."""
    inner = b"5\r\nhello\r\n"
    assert data_size(b"%x\r\n%b\r\n" % (len(inner), inner)) == len(inner)
