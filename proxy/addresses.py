"""Addresses in the settings: where they may lead, and what of them may be shown."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import Secret

__all__ = [
    "REDIS_SCHEMES",
    "StoreUrl",
    "masked",
    "networks",
    "origin",
    "prefix",
    "store_url",
]

REDIS_SCHEMES = ("redis", "rediss")
_DATABASE = re.compile(r"(/\d*)?")
_MASK = "***"


def origin(value: str) -> str:
    """Accept http(s)://host[:port][/prefix]; a request's path is appended to the prefix."""
    parts = urlsplit(value)
    try:
        port_ok = parts.port is None or parts.port > 0
    except ValueError:
        port_ok = False
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not port_ok
        or parts.query
        or parts.fragment
        or "?" in value
        or "#" in value
        or parts.username is not None
        or parts.path.startswith("//")
        or any(segment in (".", "..") for segment in unquote(parts.path).split("/"))
        or "\\" in unquote(value)
        or any(ord(character) <= 0x20 or ord(character) > 0x7E for character in value)  # noqa: PLR2004 - ASCII's edges
    ):
        raise ValueError(
            "must be http://HOST[:PORT] or https://HOST[:PORT], optionally with a path prefix"
            " without dot segments, without query, fragment or user"
        )
    return value.rstrip("/")


def networks(value: str) -> str:
    """Accept a comma-separated list of IP addresses and networks."""
    for part in filter(None, (piece.strip() for piece in value.split(","))):
        try:
            ipaddress.ip_network(part, strict=False)
        except ValueError as error:
            raise ValueError(
                f"{part!r} is not an IP address or network such as 10.0.0.0/8"
            ) from error
    return value


class StoreUrl(Secret[str]):
    """Where copies are kept; who logs in there, and with what, is shown to nobody."""

    def _display(self) -> str:
        return masked(self.get_secret_value())


def store_url(value: StoreUrl) -> StoreUrl:
    """Accept memory:, sqlite:PATH, redis://… and rediss://…."""
    url = value.get_secret_value()
    if url == "memory:" or (url.startswith("sqlite:") and len(url) > len("sqlite:")):
        return value
    parts = urlsplit(url)
    try:
        reachable = parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        reachable = False
    if parts.scheme not in REDIS_SCHEMES or not reachable or not _DATABASE.fullmatch(parts.path):
        raise ValueError(
            "must be memory:, sqlite:PATH, redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE] or the"
            " same with rediss: for TLS"
        )
    if any(not name.startswith("ssl_") for name, _ in parse_qsl(parts.query)):
        raise ValueError("may have behind its ? only what TLS needs, such as ssl_ca_certs=PATH")
    return value


def prefix(value: str) -> str:
    """Accept nothing, or a path without a slash at its end."""
    if value and (not value.startswith("/") or value.endswith("/")):
        raise ValueError("must begin with a slash and not end with one, such as /llm")
    return value


def masked(value: str) -> str:
    """Hide who logs in where, and with what, if this is a URL."""
    if "://" not in value:
        return value
    try:
        parts = urlsplit(value)
    except ValueError:
        return _MASK
    user, _, place = parts.netloc.rpartition("@")
    pairs = [pair.partition("=") for pair in parts.query.split("&") if pair]
    query = "&".join(f"{name}={_MASK}" if given else _MASK for name, given, _ in pairs)
    return parts._replace(netloc=f"{_MASK}@{place}" if user else place, query=query).geturl()
