"""A request as bytes: its head and its body, framed as its own header says.

Nothing is added and nothing is changed; what could break the framing of the connection is refused
before a byte is sent.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import httpx

_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# RFC 9110 section 5.5: visible characters, obs-text, space and tab.
_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
# No space and no control byte: these end the request line. Bytes above 0x7f do not, so they pass
# and the server judges them.
_TARGET: Final = re.compile(rb"[\x21-\x7e\x80-\xff]+")
_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})


@dataclass(slots=True)
class OutgoingRequest:
    """One request, checked and ready for the wire.

    `payload` is the framed body where its bytes are known; otherwise `frames()` pulls it.
    """

    head: bytes
    payload: bytes | None
    head_only: bool  # the response to a HEAD has no body, whatever its header says
    idempotent: bool
    _stream: AsyncIterable[bytes] | None = None
    _length: int | None = 0  # None: chunked
    pulled: bool = False  # something was asked of the stream: it cannot be sent again
    whole: bool = False  # the frame given last was the last

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the streamed body framed as the header announced it.

        Raises `httpx.LocalProtocolError` when the stream gives more or less than
        `Content-Length`, and whatever the stream raises, as it is.
        """
        if self._stream is None:
            return
        self.pulled = True
        given = 0
        chunks = aiter(self._stream)
        try:
            async for chunk in chunks:
                if not chunk:
                    continue  # an empty HTTP chunk would end the body
                given += len(chunk)
                if self._length is None:
                    yield b"%x\r\n%b\r\n" % (len(chunk), chunk)
                elif given > self._length:
                    raise _wrong_length(given, self._length)
                else:
                    self.whole = given == self._length
                    yield chunk
                    if self.whole:
                        return  # the stream's own end may still be to come
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()
        if self._length is None:
            self.whole = True
            yield b"0\r\n\r\n"
        elif given < self._length:
            raise _wrong_length(given, self._length)


def encode(request: httpx.Request) -> OutgoingRequest:
    """Return `request` as it will be sent, or raise `httpx.LocalProtocolError`.

    The target is `request.extensions["target"]` (bytes) or the URL's raw path.
    """
    target = request.extensions.get("target") or request.url.raw_path
    method = request.method.encode("ascii", "replace")  # a replaced "?" is no token byte
    if not _TOKEN.fullmatch(method):
        raise httpx.LocalProtocolError(f"method {request.method!r} is not an HTTP token")
    if not isinstance(target, bytes) or not _TARGET.fullmatch(target):
        raise httpx.LocalProtocolError("the request target holds bytes that HTTP does not allow")

    headers = request.headers.raw
    _check_values(headers)
    lines = [b"%b %b HTTP/1.1" % (method, target)]
    lengths: list[bytes] = []
    codings: list[bytes] = []
    for name, value in headers:
        match _lowered(name):
            case b"content-length":
                lengths.append(value.strip(b" \t"))
            case b"transfer-encoding":
                codings.append(value.strip(b" \t").lower())
        lines.append(b"%b: %b" % (name, value))
    length = _announced_length(lengths, codings)

    outgoing = OutgoingRequest(
        head=b"\r\n".join([*lines, b"", b""]),
        payload=None,
        head_only=method == b"HEAD",
        idempotent=request.method in _IDEMPOTENT,
        _length=length,
    )
    stream = request.stream
    if isinstance(stream, httpx.ByteStream):
        outgoing.payload = _frame(b"".join(stream), length)
    elif isinstance(stream, AsyncIterable):
        outgoing._stream = stream  # noqa: SLF001 - ours, still being built
    else:
        raise httpx.LocalProtocolError("the request body is neither bytes nor an async stream")
    return outgoing


@lru_cache(maxsize=4096)  # clients send the same few names, and a check costs more than a look-up
def _lowered(name: bytes) -> bytes:
    """Return a header's name in lower case, or raise if it is none."""
    if not _TOKEN.fullmatch(name):
        raise httpx.LocalProtocolError(f"header name {name!r} is not an HTTP token")
    return name.lower()


def _check_values(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Look at all values at once, and for the wrong one only if there is one."""
    if _VALUE.fullmatch(b"".join([value for _, value in headers])):
        return
    for name, value in headers:
        if not _VALUE.fullmatch(value):
            raise httpx.LocalProtocolError(
                f"header {name!r} holds bytes that HTTP does not allow"  # the value may be secret
            )


def _announced_length(lengths: list[bytes], codings: list[bytes]) -> int | None:
    """Return the body's length by the header: None when chunked, 0 when it says nothing."""
    if codings:
        if codings != [b"chunked"] or lengths:
            raise httpx.LocalProtocolError(
                "the only framing besides Content-Length is one 'Transfer-Encoding: chunked'"
            )
        return None
    if not lengths:
        return 0
    if len(lengths) > 1 or not lengths[0].isdigit():
        raise httpx.LocalProtocolError("Content-Length must be one decimal number")
    return int(lengths[0])


def _frame(body: bytes, length: int | None) -> bytes:
    if length is None:
        return (b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)) if body else b"0\r\n\r\n"
    if len(body) != length:
        raise _wrong_length(len(body), length)
    return body


def _wrong_length(given: int, announced: int) -> httpx.LocalProtocolError:
    return httpx.LocalProtocolError(
        f"the request body gives {given} bytes where its header announces {announced}"
    )
