"""An HTTP/1.1 client that shows the bytes: every header pair, every chunk, how a body ended."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from tests.fake_connection import Header, values
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

Ending = Literal["clean", "cut", "reset"]

RESPONSES = "/v1/responses"
STREAM = b'{"model":"tiny","input":"moby","stream":true}'


class Cut(Exception):  # noqa: N818 -- what happened
    """The body ended before its framing said so; the argument says how."""


@dataclass
class Answer:
    """What came back."""

    status: int
    reason: str
    headers: list[Header]
    chunks: list[bytes] = field(default_factory=list)
    """The pieces of the body as the server framed them; one piece where it has a length."""
    ending: Ending = "clean"

    @property
    def body(self) -> bytes:
        """The body without framing."""
        return b"".join(self.chunks)

    def json(self) -> Any:
        """Decode the body."""
        return json.loads(self.body)

    def values(self, name: str) -> list[bytes]:
        """All values of a header, in the order in which they came."""
        return values(self.headers, name)


class Wire:
    """One connection to the proxy."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.host = host

    async def send(self, data: bytes) -> None:
        """Write bytes as they are."""
        self.writer.write(data)
        async with asyncio.timeout(PATIENCE_S):
            await self.writer.drain()

    async def request(
        self,
        method: str,
        target: str,
        headers: Iterable[tuple[str, str]] = (),
        body: bytes | None = None,
    ) -> None:
        """Write a request: Host, the headers as given, the length of a body."""
        lines = [f"{method} {target} HTTP/1.1"]
        if not any(name.lower() == "host" for name, _ in headers):
            lines.append(f"Host: {self.host}")
        lines += [f"{name}: {value}" for name, value in headers]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        await self.send(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b""))

    async def post(self, body: bytes = STREAM, headers: Iterable[tuple[str, str]] = ()) -> None:
        """Write a POST /v1/responses."""
        await self.request(
            "POST", RESPONSES, [("Content-Type", "application/json"), *headers], body
        )

    async def head(self) -> Answer:
        """Read the head of an answer."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                raw = await self.reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionResetError) as error:
                raise Cut(_how(error)) from error
        first, *lines = raw[:-4].split(b"\r\n")
        _, status, reason = first.split(b" ", 2)
        pairs = [line.partition(b":") for line in lines]
        return Answer(
            int(status),
            reason.decode(),
            [(name, value.strip(b" \t")) for name, _, value in pairs],
        )

    async def chunk(self) -> bytes:
        """Read one HTTP chunk; empty after the last one."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                size = int(await self.reader.readuntil(b"\r\n"), 16)
                return (await self.reader.readexactly(size + 2))[:-2]
            except (asyncio.IncompleteReadError, ConnectionResetError) as error:
                raise Cut(_how(error)) from error

    async def event(self) -> bytes:
        """Read one HTTP chunk that must hold one event."""
        chunk = await self.chunk()
        assert chunk.count(b"\n\n") == 1, chunk
        assert chunk.endswith(b"\n\n"), chunk
        return chunk

    async def body(self, answer: Answer, *, method: str = "GET") -> Answer:
        """Read the rest of an answer, however it ends."""
        lengths = answer.values("content-length")
        chunked = answer.values("transfer-encoding") == [b"chunked"]
        assert not (lengths and chunked)
        try:
            if method == "HEAD" or answer.status in {204, 304}:
                pass
            elif chunked:
                while chunk := await self.chunk():
                    answer.chunks.append(chunk)
            else:
                assert lengths, "neither a length nor chunks"
                async with asyncio.timeout(PATIENCE_S):
                    answer.chunks.append(await self.reader.readexactly(int(lengths[0])))
        except (asyncio.IncompleteReadError, ConnectionResetError, Cut) as error:
            answer.ending = _how(error)
        return answer

    async def answer(self, *, method: str = "GET") -> Answer:
        """Read a whole answer, however it ends."""
        return await self.body(await self.head(), method=method)

    async def at_eof(self) -> bool:
        """Wait for the next byte or the end of the connection; say whether it was the end."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return not await self.reader.read(1)
            except ConnectionResetError:
                return True

    def leave(self) -> None:
        """Close the connection."""
        self.writer.close()

    def reset(self) -> None:
        """Break the connection (RST)."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def connect(url: str, *, receive_buffer: int | None = None) -> AsyncIterator[Wire]:
    """Open a connection; with a small receive buffer a reader that pauses is felt soon."""
    parts = urlsplit(url)
    sock = socket.socket(proto=socket.IPPROTO_TCP)  # without proto, asyncio sets no TCP_NODELAY
    sock.setblocking(False)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=receive_buffer or 2**16)
    try:
        yield Wire(reader, writer, parts.netloc)
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)


async def exchange(
    url: str,
    method: str,
    target: str,
    headers: Iterable[tuple[str, str]] = (),
    body: bytes | None = None,
) -> Answer:
    """Send one request on a connection of its own and read the whole answer."""
    async with connect(url) as wire:
        await wire.request(method, target, list(headers), body)
        return await wire.answer(method=method)


async def post_stream(
    url: str, body: bytes = STREAM, headers: Iterable[tuple[str, str]] = ()
) -> Answer:
    """Send one streaming POST /v1/responses and read the whole answer."""
    return await exchange(
        url, "POST", RESPONSES, [("Content-Type", "application/json"), *headers], body
    )


def _how(error: Exception) -> Ending:
    if isinstance(error, Cut):
        return error.args[0]  # type: ignore[no-any-return]
    return "reset" if isinstance(error, ConnectionResetError) else "cut"
