"""An upstream made of bytes: a test accepts a connection, reads what came, sends what it likes."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from typing import TYPE_CHECKING, Self

from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

TLS_NAME = "upstream.test"
"""What the test's certificate says."""

# Made for this file, for the name above, until the year 2120; it is good for nothing else.
_TLS_IDENTITY = """
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg5uTbQD0FKTp2urAm
O2IIUlnHMMNXNkkSe3mQbc1e8kWhRANCAAQ2707q/ZuQa3zX0Jcr3reVGiQMiFMT
plhZ4+I1N0cwkcD8CdDjpgJ8XlSwUQiBUC9EetHu75kYeEx0mpk4Unwb
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBbTCCAROgAwIBAgIBATAKBggqhkjOPQQDAjAYMRYwFAYDVQQDDA11cHN0cmVh
bS50ZXN0MCAXDTIwMDEwMTAwMDAwMFoYDzIxMjAwMTAxMDAwMDAwWjAYMRYwFAYD
VQQDDA11cHN0cmVhbS50ZXN0MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAENu9O
6v2bkGt819CXK963lRokDIhTE6ZYWePiNTdHMJHA/AnQ46YCfF5UsFEIgVAvRHrR
7u+ZGHhMdJqZOFJ8G6NMMEowGAYDVR0RBBEwD4INdXBzdHJlYW0udGVzdDAPBgNV
HRMBAf8EBTADAQH/MB0GA1UdDgQWBBTU1XY9qcun6nbaR5BflvqGUVE0hjAKBggq
hkjOPQQDAgNIADBFAiEAiNJy61Y3Wsy+X9YeoSvSIJkDU2hHXI7kUHXQrW9nRCQC
IHxFY8+9ApNTrEdQX5dgrhUD+ns3MIcuol/i16zC89Xk
-----END CERTIFICATE-----
"""


def tls_contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return what a server needs to speak TLS, and what a client needs to trust it."""
    identity = directory / "upstream.pem"
    identity.write_text(_TLS_IDENTITY)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(identity)
    return server, ssl.create_default_context(cafile=str(identity))


class RawPeer:
    """The server's side of one accepted connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def head(self) -> bytes:
        """Return the bytes up to and with the blank line that ends a request's head."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readuntil(b"\r\n\r\n")

    async def exactly(self, count: int) -> bytes:
        """Return the next bytes."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readexactly(count)

    async def left(self) -> bytes:
        """Return all that comes until the client has gone, or has reset the connection."""
        received = bytearray()
        async with asyncio.timeout(PATIENCE_S):
            try:
                while data := await self._reader.read(65536):
                    received += data
            except ConnectionError:
                pass
        return bytes(received)

    def send(self, data: bytes) -> None:
        """Send bytes, one write."""
        self._writer.write(data)

    async def drained(self) -> None:
        """Return when the kernel has taken all that was sent."""
        self._writer.transport.set_write_buffer_limits(high=0)
        await self._writer.drain()

    @property
    def unsent(self) -> int:
        """Bytes that the kernel does not take, because the client does not read."""
        return self._writer.transport.get_write_buffer_size()

    def send_eof(self) -> None:
        """End our side alone."""
        self._writer.write_eof()

    def close(self) -> None:
        """End the connection; where the client's bytes are unread, the kernel resets it."""
        self._writer.close()

    def reset(self) -> None:
        """End the connection with RST."""
        connection = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


def reset(connection: socket.socket) -> None:
    """Close a blocking socket with RST, before this returns."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class RawServer:
    """Listens on a port of its own; connections are taken in order by `accept`."""

    def __init__(self, ssl_context: ssl.SSLContext | None = None) -> None:
        self._ssl_context = ssl_context
        self._accepted: asyncio.Queue[RawPeer] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self.port = 0
        self.connections = 0

    async def accept(self) -> RawPeer:
        """Return the next connection."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._accepted.get()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        self._accepted.put_nowait(RawPeer(reader, writer))

    async def __aenter__(self) -> Self:
        # A small receive buffer, so that a peer that does not read is felt soon.
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        self._server = await asyncio.start_server(
            self._take, sock=listener, limit=64 * 1024, ssl=self._ssl_context
        )
        self.port = listener.getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        # Their closing takes a turn of the loop; nothing of a test is left after it.
        await asyncio.gather(
            *(writer.wait_closed() for writer in self._writers), return_exceptions=True
        )
