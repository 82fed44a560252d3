"""A real WebSocket server as upstream, whose side of each connection the test plays itself."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from websockets.asyncio.client import connect as connect_websocket
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from websockets.asyncio.client import ClientConnection
    from websockets.asyncio.connection import Connection
    from websockets.asyncio.server import ServerConnection


class Listening(Protocol):
    """Whatever has a traffic port."""

    url: str


REALTIME = "/v1/realtime"
HANDSHAKE = [
    ("Connection", "keep-alive, Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ("Sec-WebSocket-Version", "13"),
]
"""What a client must say; the example of RFC 6455, section 1.3."""


class Upstream:
    """A server that hands each accepted connection to the test."""

    def __init__(self) -> None:
        self.accepted: asyncio.Queue[ServerConnection] = asyncio.Queue()
        self.url = ""

    async def accept(self) -> ServerConnection:
        """Wait for the next connection."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.accepted.get()

    async def handle(self, connection: ServerConnection) -> None:
        """Keep a connection until it is over."""
        self.accepted.put_nowait(connection)
        await connection.wait_closed()


@asynccontextmanager
async def websocket_upstream(**options: Any) -> AsyncIterator[Upstream]:
    """Run a server, by default without limits of its own, until the block is left."""
    upstream = Upstream()
    defaults: dict[str, Any] = {"max_size": None, "ping_interval": None}
    async with serve(upstream.handle, "127.0.0.1", 0, **defaults | options) as server:
        scheme = "https" if "ssl" in options else "http"
        upstream.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield upstream


def dial(proxy: Listening, target: str = REALTIME, **options: Any) -> connect_websocket:
    """Return a client of the proxy, to be awaited or entered."""
    url = proxy.url.replace("http://", "ws://") + target
    defaults: dict[str, Any] = {"proxy": None, "max_size": None, "ping_interval": None}
    return connect_websocket(url, **defaults | options)


@asynccontextmanager
async def joined(
    proxy: Listening, upstream: Upstream, target: str = REALTIME, **options: Any
) -> AsyncIterator[tuple[ClientConnection, ServerConnection]]:
    """Give both ends of one relayed WebSocket."""
    async with dial(proxy, target, **options) as client:
        server = await upstream.accept()
        try:
            yield client, server
        finally:
            client.transport.abort()
            server.transport.abort()


async def received(connection: Connection) -> str | bytes:
    """Return the next message."""
    async with asyncio.timeout(PATIENCE_S):
        return await connection.recv()


async def closed(connection: Connection) -> tuple[int, str]:
    """Wait for the close frame that comes, behind all messages, and return what it says."""
    try:
        while True:
            await received(connection)
    except ConnectionClosed as error:
        return (1006, "") if error.rcvd is None else (error.rcvd.code, error.rcvd.reason)
