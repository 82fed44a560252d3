"""Requests as bytes, cut in any way, and what must be true of the answer to a refused one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.e2e.wire import Answer, Wire, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"


def head(*lines: bytes, first: bytes = b"POST /x HTTP/1.1", host: bytes | None = b"a") -> bytes:
    """Join a request line and header lines, a Host first unless there shall be none."""
    hosts = [] if host is None else [b"Host: " + host]
    return b"\r\n".join([first, *hosts, *lines, b"", b""])


def chunked(body: bytes, *lines: bytes) -> bytes:
    """Make a request with a chunked body, framed by the caller."""
    return head(b"Transfer-Encoding: chunked", *lines) + body


def whole(data: bytes) -> list[bytes]:
    """Send all at once."""
    return [data]


def halves(data: bytes) -> list[bytes]:
    """Send two pieces."""
    return [data[: len(data) // 2], data[len(data) // 2 :]]


def by_byte(data: bytes) -> list[bytes]:
    """Send every byte alone."""
    return [data[place : place + 1] for place in range(len(data))]


CUTS: dict[str, Callable[[bytes], list[bytes]]] = {
    "whole": whole,
    "halves": halves,
    "byte by byte": by_byte,
}


async def send(wire: Wire, pieces: Iterable[bytes]) -> None:
    """Send the pieces, each read before the next."""
    for piece in pieces:
        await wire.send(piece)
        await asyncio.sleep(0)


async def last_answer(wire: Wire, *, method: str = "GET") -> Answer:
    """Read one answer that is the last of its connection."""
    answer = await wire.answer(method=method)
    assert answer.ending == "clean"
    assert await wire.at_eof(), "the connection goes on"
    return answer


async def talk(url: str, pieces: Iterable[bytes], *, method: str = "GET") -> Answer:
    """Send pieces on a connection of their own, and read the answer that must be its last."""
    async with connect(url) as wire:
        await send(wire, pieces)
        return await last_answer(wire, method=method)


def assert_refused(answer: Answer, *statuses: int) -> None:
    """Check a refusal: its status, OpenAI's shape, an id, and that it ends the connection."""
    assert answer.status in statuses, (answer.status, answer.body)
    assert answer.values("content-type") == [b"application/json"]
    assert answer.values("connection") == [b"close"]
    assert len(answer.values("x-request-id")) == 1
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status
    assert error["type"] == "invalid_request_error" if answer.status < 500 else "server_error"
    assert error["message"].endswith(".")
