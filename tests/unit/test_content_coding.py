"""Compressed streams, undone with bounded memory."""

from __future__ import annotations

import gzip
import zlib

import pytest

from proxy.core.content_coding import InflateError, Inflater
from tests.sse import one_by_one

TEXT = b"data: " + bytes(range(256)) * 50 + b"\n\n"


def _raw_deflate(data: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return encoder.compress(data) + encoder.flush()


@pytest.mark.parametrize(
    "coded",
    [
        pytest.param(gzip.compress(TEXT), id="gzip"),
        pytest.param(gzip.compress(TEXT[:100]) + gzip.compress(TEXT[100:]), id="two members"),
        pytest.param(zlib.compress(TEXT), id="deflate"),
        pytest.param(_raw_deflate(TEXT), id="deflate without zlib's header"),
    ],
)
def test_decodes_however_it_is_cut(coded: bytes) -> None:
    """What was encoded comes out, whole or byte by byte."""
    for chunks in ([coded], one_by_one(coded)):
        inflater = Inflater()
        assert b"".join(b"".join(inflater.feed(chunk)) for chunk in chunks) == TEXT


def test_a_bomb_comes_out_in_small_pieces() -> None:
    """Nothing larger than 64 KiB comes out at once, and all of it comes."""
    size = 50 * 1024 * 1024
    pieces = [len(piece) for piece in Inflater().feed(gzip.compress(bytes(size)))]
    assert max(pieces) <= 64 * 1024
    assert sum(pieces) == size


def test_an_event_is_out_when_it_was_flushed() -> None:
    """A flushed event is decoded at once, not with the next one."""
    encoder = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    inflater = Inflater()
    for event in (b"data: 1\n\n", b"data: 2\n\n"):
        flushed = encoder.compress(event) + encoder.flush(zlib.Z_SYNC_FLUSH)
        assert b"".join(inflater.feed(flushed)) == event


@pytest.mark.parametrize(
    "broken",
    [b"no gzip at all", gzip.compress(TEXT)[:50] + b"\0" * 50],
    ids=["not gzip", "broken off"],
)
def test_broken(broken: bytes) -> None:
    """What is not what it claims to be is an error."""
    with pytest.raises(InflateError):
        list(Inflater().feed(broken))
