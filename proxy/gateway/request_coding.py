"""Undo the ``Content-Encoding`` of a create request: Codex sends zstd, and vLLM reads none."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Final, Protocol

from proxy.core.content_coding import DECODABLE, PIECE_BYTES, InflateError, Inflater
from proxy.errors import BadRequestError
from proxy.upstream.headers import values

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from proxy.upstream.headers import Pairs

__all__ = ["BodyDecoder", "decoded", "decoder_for"]

_ACCEPTED: Final = ((b"accept-encoding", b"gzip, deflate, zstd"),)
_BAD_REQUEST: Final = 400
_UNSUPPORTED: Final = 415
# RFC 9659: what zstd may ask of whoever decodes it, as a content coding, is 8 MiB.
_ZSTD_WINDOW_LOG: Final = 23


class BodyDecoder(Protocol):
    """Undoes one coding, chunk by chunk; both methods raise ``InflateError``."""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the decoded bytes of ``chunk`` in pieces of ``PIECE_BYTES`` at most."""

    def finish(self) -> None:
        """Take the end of the body."""


class _ZstdDecoder:
    """A ``BodyDecoder`` for zstd (RFC 8878), of one frame or several."""

    def __init__(self) -> None:
        self._decoder = self._next_frame()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the decoded bytes of ``chunk`` in pieces."""
        try:
            while chunk:
                if self._decoder.eof:
                    self._decoder = self._next_frame()
                yield self._decoder.decompress(chunk, PIECE_BYTES)
                while not (self._decoder.needs_input or self._decoder.eof):
                    yield self._decoder.decompress(b"", PIECE_BYTES)
                chunk = self._decoder.unused_data
        except zstd.ZstdError as error:
            raise InflateError(f"the compressed bytes are broken: {error}") from error

    def finish(self) -> None:
        """Take the end of the body."""
        if not self._decoder.eof:
            raise InflateError("the compressed bytes end too early")

    @staticmethod
    def _next_frame() -> zstd.ZstdDecompressor:
        limits: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
        return zstd.ZstdDecompressor(options=limits)


def decoder_for(headers: Pairs) -> BodyDecoder | None:
    """Return what undoes the coding of a request's body, None if it has none.

    Raises ``BadRequestError`` (415) for a coding that is not known here, and for several: nobody
    sends them, and each could be a bomb inside a bomb.
    """
    given = b",".join(values(headers, b"content-encoding")).lower().split(b",")
    codings = [coding for name in given if (coding := name.strip()) not in (b"", b"identity")]
    match codings:
        case []:
            return None
        case [b"zstd"]:
            return _ZstdDecoder()
        case [coding] if coding in DECODABLE:
            return Inflater(coding)
    names = b", ".join(codings).decode("latin-1")
    raise BadRequestError(
        _UNSUPPORTED,
        f"The request body's Content-Encoding ({names}) is not supported. Send it without one, or"
        " with one of gzip, deflate and zstd.",
        param="Content-Encoding",
        headers=_ACCEPTED,
    )


async def decoded(chunks: AsyncIterator[bytes], decoder: BodyDecoder) -> AsyncIterator[bytes]:
    """Yield a body's decoded bytes; other requests get their turn between the pieces.

    Raises ``BadRequestError`` (400) for a body that is not what its ``Content-Encoding`` says.
    """
    try:
        async for chunk in chunks:
            for piece in decoder.feed(chunk):
                if piece:
                    yield piece
                await asyncio.sleep(0)  # also behind an empty piece: thousands fit into one read
        decoder.finish()
    except InflateError as error:
        raise BadRequestError(
            _BAD_REQUEST,
            f"The request body is not what its Content-Encoding says: {error}.",
            param="Content-Encoding",
        ) from error
