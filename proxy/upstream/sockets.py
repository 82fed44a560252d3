"""A connection's socket, where asyncio does not say enough: acknowledging, losing, reading on."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import httpx

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

__all__ = ["acknowledge_later", "lost_error", "unread"]

_READ_BYTES: Final = 65536
_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)  # Linux


def acknowledge_later(transport: asyncio.Transport) -> None:
    """Let the kernel acknowledge several events at once, which makes an event cheaper by a tenth.

    Linux does so by itself on a connection that has been used before (tcp(7), TCP_QUICKACK). A
    sender that waits for it (Nagle's algorithm, which vLLM's uvloop turns off) waits 40 ms once.
    """
    connection = transport.get_extra_info("socket")
    if connection is not None and _QUICKACK is not None:
        connection.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 0)


def unread(transport: asyncio.Transport) -> Iterator[bytes]:
    """Read what lies in the receive buffer of a socket that asyncio is giving up.

    A server that refuses an upload (413, 401) answers and closes. The failed write makes asyncio
    give up the socket, although the answer has come. Behind TLS it cannot be had.
    """
    if transport.get_extra_info("sslcontext") is not None:
        return
    connection = transport.get_extra_info("socket")
    with suppress(OSError):
        while data := os.read(connection.fileno(), _READ_BYTES):
            yield data


def lost_error(exc: Exception, *, request_sent: bool) -> httpx.NetworkError:
    """Return httpx's error for a connection that was lost with a request on it."""
    error: httpx.NetworkError = httpx.ReadError(f"upstream's connection was lost: {exc}")
    if isinstance(exc, BrokenPipeError) or not request_sent:
        error = httpx.WriteError(f"upstream took no more of the request: {exc}")
    error.__cause__ = exc
    return error
