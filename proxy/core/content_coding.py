"""Undo gzip or deflate of an event stream with bounded memory (RFC 9110, section 8.4.1)."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DECODABLE", "InflateError", "Inflater"]

DECODABLE = frozenset({b"gzip", b"x-gzip", b"deflate"})
_PIECE_BYTES = 64 * 1024
_ZLIB_HEADER_BYTES = 2
_ZLIB_OR_GZIP = 32 + zlib.MAX_WBITS


class InflateError(ValueError):
    """The stream is not what its ``Content-Encoding`` says."""


class Inflater:
    """Decode one body, chunk by chunk; what comes out at once is at most 64 KiB."""

    __slots__ = ("_decoder", "_header", "_raw_tried")

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(_ZLIB_OR_GZIP)
        self._header = b""  # a first byte that came alone: zlib's header is two
        self._raw_tried = False

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the decoded bytes of ``chunk`` in pieces; raises ``InflateError``."""
        while chunk:
            try:
                piece = self._decoder.decompress(chunk, _PIECE_BYTES)
            except zlib.error as error:
                chunk = self._try_raw(chunk, error)
                continue
            if not self._raw_tried and len(self._header + chunk) < _ZLIB_HEADER_BYTES:
                self._header += chunk
            else:
                self._raw_tried = True
            if piece:
                yield piece
            if self._decoder.eof:  # another gzip member may follow
                chunk = self._decoder.unused_data
                self._decoder = zlib.decompressobj(_ZLIB_OR_GZIP)
            else:
                chunk = self._decoder.unconsumed_tail
                if not chunk and len(piece) == _PIECE_BYTES:
                    yield from self._rest()

    def _rest(self) -> Iterator[bytes]:
        """Yield what zlib still holds although it took all of the input."""
        while piece := self._decoder.decompress(b"", _PIECE_BYTES):
            yield piece

    def _try_raw(self, chunk: bytes, error: zlib.error) -> bytes:
        """Take ``deflate`` without zlib's header too, as many servers send it."""
        if self._raw_tried:
            raise InflateError(f"the compressed stream is broken: {error}") from error
        self._raw_tried = True
        self._decoder = zlib.decompressobj(-zlib.MAX_WBITS)
        return self._header + chunk
