"""Undo gzip or deflate with bounded memory (RFC 9110, section 8.4.1)."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DECODABLE", "PIECE_BYTES", "InflateError", "Inflater"]

DECODABLE = frozenset({b"gzip", b"x-gzip", b"deflate"})
PIECE_BYTES = 64 * 1024
_ZLIB_HEADER_BYTES = 2
_GZIP = 16 + zlib.MAX_WBITS
# JSON's words come to a tenth or a thirtieth; zlib's most is 1 : 1032.
_BOMB_RATIO = 200


class InflateError(ValueError):
    """The bytes are not what their ``Content-Encoding`` says."""


class Inflater:
    """Decode one body, chunk by chunk; what comes out at once is at most ``PIECE_BYTES``.

    ``coding`` is one of ``DECODABLE``.  ``deflate`` is taken with zlib's header and, as many send
    it, without; gzip may have several members.
    """

    __slots__ = ("_decoder", "_header", "_in", "_is_gzip", "_out", "_raw_tried")

    def __init__(self, coding: bytes) -> None:
        self._is_gzip = coding != b"deflate"
        self._decoder = zlib.decompressobj(_GZIP if self._is_gzip else zlib.MAX_WBITS)
        self._header = b""  # a first byte that came alone: zlib's header is two
        self._raw_tried = self._is_gzip
        self._in = self._out = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the decoded bytes of ``chunk`` in pieces, one at least for each gzip member.

        Raises ``InflateError``.
        """
        while chunk:
            if self._decoder.eof:
                self._begin_member()
            try:
                piece = self._decoder.decompress(chunk, PIECE_BYTES)
            except zlib.error as error:
                chunk = self._try_raw(chunk, error)
                continue
            if not self._raw_tried and len(self._header + chunk) < _ZLIB_HEADER_BYTES:
                self._header += chunk
            else:
                self._raw_tried = True
            rest = self._decoder.unused_data or self._decoder.unconsumed_tail
            self._in += len(chunk) - len(rest)
            self._out += len(piece)
            chunk = rest
            if piece or self._decoder.eof:  # thousands of empty members fit into one chunk
                yield piece
            if not rest and len(piece) == PIECE_BYTES and not self._decoder.eof:
                yield from self._rest()

    def finish(self) -> None:
        """Take the end of the body; raises ``InflateError`` if it is cut short."""
        if not self._decoder.eof:
            raise InflateError("the compressed bytes end too early")

    def refuse_bomb(self) -> None:
        """Raise ``InflateError`` if far more came out than text gives for what went in."""
        if self._out > self._in * _BOMB_RATIO:
            raise InflateError("the compressed stream is one endless event")

    def _begin_member(self) -> None:
        """Go on behind a whole member: only gzip has several."""
        if not self._is_gzip:
            raise InflateError("something follows the compressed bytes")
        self._decoder = zlib.decompressobj(_GZIP)

    def _rest(self) -> Iterator[bytes]:
        """Yield what zlib still holds although it took all of the input."""
        while piece := self._decoder.decompress(b"", PIECE_BYTES):
            self._out += len(piece)
            yield piece

    def _try_raw(self, chunk: bytes, error: zlib.error) -> bytes:
        """Take ``deflate`` without zlib's header too, as many servers send it."""
        if self._raw_tried:
            raise InflateError(f"the compressed bytes are broken: {error}") from error
        self._raw_tried = True
        self._decoder = zlib.decompressobj(-zlib.MAX_WBITS)
        return self._header + chunk
