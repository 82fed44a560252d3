"""Which headers cross the proxy, and which it writes itself (RFC 9110, section 7.6)."""

from __future__ import annotations

import ipaddress
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "HOP_BY_HOP_HEADERS",
    "Forwarding",
    "Pairs",
    "response_headers",
    "values",
    "with_identity_body",
]

Pairs = list[tuple[bytes, bytes]]

HOP_BY_HOP_HEADERS = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_SENT_UP = HOP_BY_HOP_HEADERS | {
    b"expect",
    b"via",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-proto",
}
_NOT_SENT_UP_FOR_IDENTITY = _NOT_SENT_UP | {b"accept-encoding"}
# What stands in a request's head for the proxy itself; one pass collects it.
_TOLD = frozenset(
    {
        b"connection",
        b"host",
        b"transfer-encoding",
        b"via",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-request-id",
    }
)
_BODY_FRAMING = frozenset({b"content-encoding", b"content-length", b"transfer-encoding"})


def values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """Return the values of all headers of this (lower-case) name, in order."""
    return [value for key, value in headers if key.lower() == name]


def _named_by(connection: Iterable[bytes]) -> set[bytes]:
    """Return the names that ``Connection`` makes hop-by-hop (RFC 9110, section 7.6.1)."""
    return {token.strip().lower() for value in connection for token in value.split(b",")}


def _told(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, list[bytes]]:
    told: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if name in _TOLD:
            told.setdefault(name, []).append(value)
    return told


@dataclass(frozen=True, slots=True)
class Forwarding:
    """How request headers go up.

    ``origin_host`` replaces the client's ``Host`` if given, ``default_host`` stands where a client
    of HTTP/1.0 sent none; ``pseudonym`` stands in ``Via`` for this process, so that a loop is seen.
    """

    trusted_networks: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network] = ()
    origin_host: bytes | None = None
    default_host: bytes | None = None
    pseudonym: bytes = field(default_factory=lambda: b"lastword-" + secrets.token_hex(6).encode())

    def request_headers(
        self,
        headers: Sequence[tuple[bytes, bytes]],
        *,
        peer: str | None,
        scheme: str,
        http_version: str,
        request_id: bytes,
        identity: bool,
    ) -> Pairs:
        """Return the headers that go up with a request that came with ``headers``.

        Framing is rebuilt (``Content-Length`` as it came, or chunked), hop-by-hop headers go,
        all others keep their order and bytes.  ``identity`` asks upstream for no compression.
        Raises ``BadRequestError`` (508) if this very process stands in ``Via``.
        """
        told = _told(headers)
        via = told.get(b"via", [])
        if any(self.pseudonym in value for value in via):
            raise BadRequestError(
                508, "This request came from this very proxy: --upstream leads back to it."
            )
        chunked = b"transfer-encoding" in told
        drop = _NOT_SENT_UP_FOR_IDENTITY if identity else _NOT_SENT_UP
        if b"connection" in told:
            drop |= _named_by(told[b"connection"]) - {b"content-length", b"host"}
        if chunked:
            drop |= {b"content-length"}
        out = [pair for pair in headers if pair[0] not in drop]
        if self.origin_host is not None:
            out = [(n, self.origin_host if n == b"host" else v) for n, v in out]
        if self.default_host is not None and b"host" not in told:
            out.append((b"host", self.default_host))
        if chunked:
            out.append((b"transfer-encoding", b"chunked"))
        if identity:
            out.append((b"accept-encoding", b"identity"))
        received = b"%b %b" % (http_version.encode(), self.pseudonym)
        out.append((b"via", b", ".join([*via, received])))
        if b"x-request-id" not in told:
            out.append((b"x-request-id", request_id))
        out.extend(self._forwarded(told, peer, scheme))
        return out

    def _forwarded(self, told: dict[bytes, list[bytes]], peer: str | None, scheme: str) -> Pairs:
        """Say who asked: behind a trusted proxy its word is kept and the peer appended."""
        kept = told if self._trusts(peer) else {}
        hops = kept.get(b"x-forwarded-for", []) + ([peer.encode()] if peer is not None else [])
        protocols = kept.get(b"x-forwarded-proto") or [scheme.encode()]
        hosts = kept.get(b"x-forwarded-host") or told.get(b"host", [])
        named = (
            (b"x-forwarded-for", hops),
            (b"x-forwarded-proto", protocols),
            (b"x-forwarded-host", hosts),
        )
        return [(name, b", ".join(parts)) for name, parts in named if parts]

    def _trusts(self, peer: str | None) -> bool:
        if peer is None or not self.trusted_networks:
            return False
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        return any(address in network for network in self.trusted_networks)


def with_identity_body(headers: Pairs, length: int) -> Pairs:
    """Return request headers for a body of ``length`` bytes that has no coding any more."""
    kept = [pair for pair in headers if pair[0] not in _BODY_FRAMING]
    return [*kept, (b"content-length", b"%d" % length)]


def response_headers(
    headers: Sequence[tuple[bytes, bytes]],
    *,
    request_id: bytes,
    event_stream: bool,
    rewritten: bool,
    decoded: bool,
) -> Pairs:
    """Return the headers that go down with a response that came with ``headers``.

    ``event_stream`` adds what keeps gateways from buffering; a ``rewritten`` body may change
    its length, a ``decoded`` one has lost its coding.
    """
    names = {name.lower() for name, _ in headers}
    drop = HOP_BY_HOP_HEADERS
    if b"connection" in names:
        drop |= _named_by(values(headers, b"connection")) - {b"content-length"}
    if rewritten:
        drop |= {b"content-length"}
    if decoded:
        drop |= {b"content-encoding"}
    out = [pair for pair in headers if pair[0].lower() not in drop]
    names -= drop
    if b"x-request-id" not in names:
        out.append((b"x-request-id", request_id))
    if event_stream:
        if b"x-accel-buffering" not in names:
            out.append((b"x-accel-buffering", b"no"))
        if b"cache-control" not in names:
            out.append((b"cache-control", b"no-cache"))
    return out
