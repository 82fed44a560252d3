"""What a request's head may be: judged once, before anything acts on it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from proxy.errors import BadRequestError
from proxy.gateway.target import check_target
from proxy.upstream.headers import values

if TYPE_CHECKING:
    from proxy.upstream.headers import Pairs

__all__ = ["HeadLimits", "check_head"]

# RFC 9110, section 7.2: uri-host [ ":" port ], with the characters of RFC 3986, section 3.2.2.
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*[ \t]*")
# Of 64 bits, and some zeros or spaces around; Python reads no number of thousands of digits.
_LENGTH_DIGITS = 100
_LINE_OVERHEAD = len(": \r\n")


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """How many headers, bytes and seconds a request's head may take; its trailers the same."""

    max_headers: int = 100
    max_bytes: int = 64 * 1024
    timeout_s: float = 10.0

    def check(self, target: bytes, headers: Pairs, received: int) -> None:
        """Refuse a head, whole or not, of which at most ``received`` bytes have come.

        Raises ``BadRequestError``: 431, or 414 if it is the target that takes most of them.
        """
        if len(headers) > self.max_headers:
            raise BadRequestError(
                431, f"The request has more than the {self.max_headers} headers allowed."
            )
        if received > self.max_bytes:
            long_target = 2 * len(target) > self.max_bytes
            raise BadRequestError(
                414 if long_target else 431,
                f"The request's line and headers are larger than the {self.max_bytes} bytes"
                " allowed.",
            )

    def check_whole(self, target: bytes, headers: Pairs, received: int) -> None:
        """Refuse a whole head like ``check``; ``received`` may hold more than the head."""
        if received > self.max_bytes:
            received = len(target) + sum(map(len, chain.from_iterable(headers)))
            received += _LINE_OVERHEAD * len(headers)
        self.check(target, headers, received)

    def check_framing(self, received: int, trailers: int) -> None:
        """Refuse (431) a body whose chunk framing and trailers are larger than a head may be."""
        if trailers > self.max_headers:
            raise BadRequestError(
                431, f"The request has more than the {self.max_headers} trailers allowed."
            )
        if received > self.max_bytes:
            raise BadRequestError(
                431,
                "The chunk framing or the trailers of the request's body are larger than the"
                f" {self.max_bytes} bytes allowed.",
            )


def check_head(version: str, method: bytes, target: bytes, headers: Pairs) -> bool:
    """Refuse a head that llhttp takes and nobody should pass on; names are in lower case.

    Returns whether the client waits for a 100 before it sends its body.  llhttp has refused
    before: control bytes in names and values, obs-fold, bare CR or LF, a space before a colon,
    every ``Content-Length`` but one plain number, and one beside ``Transfer-Encoding``.  Raises
    ``BadRequestError``: 417 for an unknown ``Expect``, 505 for another HTTP than 1.0 and 1.1,
    otherwise 400.
    """
    old = version == "1.0"
    if not old and version != "1.1":
        raise BadRequestError(505, "This proxy speaks HTTP/1.1 only.")
    if method == b"CONNECT":
        raise BadRequestError(400, "CONNECT was refused: this proxy serves one upstream only.")
    check_target(target)
    by_name = dict(headers)
    host = by_name.get(b"host")
    if host is None:
        if not old:
            raise BadRequestError(400, "The request has no Host header.")
    elif not _HOST.fullmatch(host):
        raise BadRequestError(400, "The request's Host header is not a host name.")
    elif len(by_name) < len(headers) and len(values(headers, b"host")) > 1:
        raise BadRequestError(400, "The request has more than one Host header.")
    if len(by_name.get(b"content-length", b"")) > _LENGTH_DIGITS:
        raise BadRequestError(400, "The request's Content-Length is longer than any number.")
    if b"transfer-encoding" in by_name:
        _check_coding(headers, old=old)
    if b"expect" not in by_name or old:  # HTTP/1.0 knows none: RFC 9110, section 10.1.1
        return False
    _check_expect(headers)
    return True


def _check_coding(headers: Pairs, *, old: bool) -> None:
    """RFC 9112, section 6.1: what is not understood surely must not be passed on."""
    codings = values(headers, b"transfer-encoding")
    if [coding.strip(b" \t").lower() for coding in codings] != [b"chunked"]:
        raise BadRequestError(400, "The only Transfer-Encoding taken is one 'chunked'.")
    if old:
        raise BadRequestError(400, "HTTP/1.0 knows no Transfer-Encoding.")


def _check_expect(headers: Pairs) -> None:
    for value in values(headers, b"expect"):
        if value.strip(b" \t").lower() != b"100-continue":
            raise BadRequestError(417, "The only Expect that is known is 100-continue.")
