"""What one side of a relayed WebSocket keeps in memory."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import OPEN
from websockets.server import ServerProtocol

from proxy.upstream.websocket_peer import WebSocketPeer, join
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def side() -> AsyncIterator[tuple[WebSocketPeer, asyncio.Transport, socket.socket]]:
    """Give one side on a small socket, its transport, and what it is connected to."""
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    far.setblocking(False)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=near)
    peer = WebSocketPeer(
        transport,
        ServerProtocol(state=OPEN),
        who="The client",
        loss_code=CloseCode.GOING_AWAY,
        stall_s=300,
    )
    with far:
        yield peer, transport, far


async def test_pongs_for_a_side_that_does_not_read_are_not_hoarded() -> None:
    """Of many pings the last one is answered (RFC 6455, 5.5.3); messages pass meanwhile."""
    loop = asyncio.get_running_loop()
    async with side() as (peer, transport, far), side() as (other, _, other_far):
        joined = asyncio.create_task(join(peer, other, b""))
        ping = Frame(Opcode.PING, b"p" * 125).serialize(mask=True)
        last = Frame(Opcode.PING, b"last").serialize(mask=True)
        text = Frame(Opcode.TEXT, b"after").serialize(mask=True)
        async with asyncio.timeout(PATIENCE_S):
            await loop.sock_sendall(far, ping * 10_000 + last + text)  # 1.3 MB
            assert await loop.sock_recv(other_far, 100) == b"\x81\x05after"
        assert transport.get_write_buffer_size() < 600_000
        came = bytearray()
        async with asyncio.timeout(PATIENCE_S):
            while not came.endswith(b"\x8a\x04last"):
                came += await loop.sock_recv(far, 65536)
        joined.cancel()
        await asyncio.wait([joined])
