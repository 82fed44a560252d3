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
    ("coding", "coded"),
    [
        pytest.param(b"gzip", gzip.compress(TEXT), id="gzip"),
        pytest.param(
            b"x-gzip", gzip.compress(TEXT[:100]) + gzip.compress(TEXT[100:]), id="two members"
        ),
        pytest.param(b"deflate", zlib.compress(TEXT), id="deflate"),
        pytest.param(b"deflate", _raw_deflate(TEXT), id="deflate without zlib's header"),
    ],
)
def test_decodes_however_it_is_cut(coding: bytes, coded: bytes) -> None:
    """What was encoded comes out, whole or byte by byte; a body cut short is known for it."""
    for chunks in ([coded], one_by_one(coded)):
        inflater = Inflater(coding)
        assert b"".join(b"".join(inflater.feed(chunk)) for chunk in chunks) == TEXT
        inflater.finish()
    for end in (0, 1, len(coded) // 4, len(coded) - 1):
        inflater = Inflater(coding)
        list(inflater.feed(coded[:end]))
        with pytest.raises(InflateError, match="end too early"):
            inflater.finish()


def test_a_bomb_comes_out_in_small_pieces() -> None:
    """Nothing larger than 64 KiB comes out at once, and all of it comes."""
    size = 50 * 1024 * 1024
    pieces = [len(piece) for piece in Inflater(b"gzip").feed(gzip.compress(bytes(size)))]
    assert max(pieces) <= 64 * 1024
    assert sum(pieces) == size


def test_every_member_is_a_step() -> None:
    """A chunk of empty gzip members keeps nobody waiting for its end: each is a piece."""
    assert list(Inflater(b"gzip").feed(gzip.compress(b"") * 50)) == [b""] * 50


def test_an_event_is_out_when_it_was_flushed() -> None:
    """A flushed event is decoded at once, not with the next one."""
    encoder = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    inflater = Inflater(b"gzip")
    for event in (b"data: 1\n\n", b"data: 2\n\n"):
        flushed = encoder.compress(event) + encoder.flush(zlib.Z_SYNC_FLUSH)
        assert b"".join(inflater.feed(flushed)) == event


@pytest.mark.parametrize(
    ("coding", "broken"),
    [
        pytest.param(b"gzip", b"no gzip at all", id="not gzip"),
        pytest.param(b"gzip", gzip.compress(TEXT)[:50] + b"\0" * 50, id="broken off"),
        pytest.param(b"gzip", gzip.compress(TEXT) + b"garbage", id="gzip, then garbage"),
        pytest.param(b"gzip", zlib.compress(TEXT), id="deflate as gzip"),
        pytest.param(b"deflate", gzip.compress(TEXT), id="gzip as deflate"),
        pytest.param(b"deflate", zlib.compress(TEXT) + b"{}", id="deflate, then garbage"),
        pytest.param(b"deflate", zlib.compress(TEXT) * 2, id="deflate twice"),
        pytest.param(b"deflate", _raw_deflate(TEXT) + b"{}", id="raw deflate, then garbage"),
    ],
)
def test_broken(coding: bytes, broken: bytes) -> None:
    """What is not what it claims to be is an error, whole or byte by byte."""
    for chunks in ([broken], one_by_one(broken)):
        inflater = Inflater(coding)
        with pytest.raises(InflateError, match=r"broken|something follows"):
            list(map(list, map(inflater.feed, chunks)))


def test_a_bomb_is_known_by_its_ratio() -> None:
    """Text never comes out a few hundred times as long as it went in; zeros do."""
    text = Inflater(b"gzip")
    list(text.feed(gzip.compress(b'{"logprob":-0.25,"token":"a"},' * 5 + TEXT)))
    text.refuse_bomb()
    bomb = Inflater(b"gzip")
    list(bomb.feed(gzip.compress(bytes(2**20))))
    with pytest.raises(InflateError, match="endless"):
        bomb.refuse_bomb()
