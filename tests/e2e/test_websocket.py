"""What passes on a WebSocket, and how it ends, with a real client and a real server."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Literal

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from proxy.upstream import websocket_peer
from tests.contract.raw_server import TLS_NAME, tls_contexts
from tests.e2e.websocket import (
    HANDSHAKE,
    REALTIME,
    closed,
    dial,
    joined,
    received,
    websocket_upstream,
)
from tests.e2e.wire import connect, exchange
from tests.prometheus import total, until_total
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from websockets.asyncio.connection import Connection

    from tests.conftest import StartLastword
    from tests.e2e.websocket import Upstream

Side = Literal["client", "upstream"]
SIDES = pytest.mark.parametrize("side", ["client", "upstream"])


@pytest.fixture
async def upstream(no_task_left: None) -> AsyncIterator[Upstream]:
    """Give a real server that leaves its side of each connection to the test."""
    async with websocket_upstream() as upstream:
        yield upstream


@SIDES
async def test_messages_pass_as_they_are(
    side: Side, upstream: Upstream, lastword: StartLastword
) -> None:
    """Text and binary, empty and large ones pass in order, in both directions."""
    proxy = await lastword(upstream=upstream.url)
    async with joined(proxy, upstream) as ends:
        sender, receiver = ends if side == "client" else ends[::-1]
        messages: list[str | bytes] = [
            *("", b"", "moby \u2028 \U0001f433", bytes(range(256))),
            *("x" * 70_000, b"y" * 3_000_000, "last"),
        ]
        for message in messages:
            await sender.send(message)
            assert await received(receiver) == message


@SIDES
async def test_fragments_pass_one_by_one(
    side: Side, upstream: Upstream, lastword: StartLastword
) -> None:
    """The first fragment of a message arrives before the last was sent; none are joined."""
    proxy = await lastword(upstream=upstream.url)
    async with joined(proxy, upstream) as ends:
        sender, receiver = ends if side == "client" else ends[::-1]
        go_on = asyncio.Event()

        async def parts() -> AsyncIterator[str]:
            yield "one"
            await go_on.wait()
            yield ""
            yield "two"

        sending = asyncio.create_task(sender.send(parts()))
        arrived = []
        async with asyncio.timeout(PATIENCE_S):
            async for part in receiver.recv_streaming():
                arrived.append(part)
                go_on.set()
            await sending
        assert "".join(map(str, arrived)) == "onetwo"
        assert arrived[:3] == ["one", "", "two"]


async def test_message_of_any_length_in_fragments(
    upstream: Upstream, lastword: StartLastword
) -> None:
    """A message far longer than the longest frame passes, a frame at a time."""
    proxy = await lastword(upstream=upstream.url)
    piece = b"z" * (websocket_peer.MAX_FRAME_BYTES // 4)
    async with joined(proxy, upstream) as (client, server):
        sending = asyncio.create_task(client.send([piece] * 8))
        assert await received(server) == piece * 8
        await sending


@SIDES
async def test_frame_that_is_too_long_closes(
    side: Side, upstream: Upstream, lastword: StartLastword, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender is told so with 1009, the other side that its peer will not come back."""
    monkeypatch.setattr("proxy.upstream.websocket.FRAME_LIMITS", (None, 1000))
    monkeypatch.setattr("proxy.gateway.websocket.FRAME_LIMITS", (None, 1000))
    proxy = await lastword(upstream=upstream.url)
    async with joined(proxy, upstream) as ends:
        sender, receiver = ends if side == "client" else ends[::-1]
        await sender.send(b"x" * 1000)
        assert await received(receiver) == b"x" * 1000
        await sender.send(b"x" * 1001)
        assert (await closed(sender))[0] == 1009
        code, reason = await closed(receiver)
        assert code == (1001 if side == "client" else 1011)
        assert "sent a frame of more than" in reason


@SIDES
@pytest.mark.parametrize(
    ("code", "reason"),
    [(None, ""), (1000, ""), (1000, "bye"), (1001, "away"), (3000, "x" * 123), (4999, "\u00fc")],
)
async def test_close_codes_and_reasons_pass(
    side: Side, code: int | None, reason: str, upstream: Upstream, lastword: StartLastword
) -> None:
    """What one side closes with reaches the other, behind the last message, and comes back."""
    proxy = await lastword(upstream=upstream.url)
    async with joined(proxy, upstream) as ends:
        closer, other = ends if side == "client" else ends[::-1]
        async with closer.send_context():
            closer.protocol.send_text(b"last")
            closer.protocol.send_close(code, reason)
        assert await received(other) == "last"
        assert await closed(other) == (code or 1005, reason)
        assert await closed(closer) == (code or 1005, reason)


@SIDES
async def test_side_that_is_lost_closes_the_other(
    side: Side, upstream: Upstream, lastword: StartLastword
) -> None:
    """1006 cannot be sent: the client hears 1011 of a lost upstream, upstream 1001 of a client."""
    proxy = await lastword(upstream=upstream.url)
    async with joined(proxy, upstream) as ends:
        lost, other = ends if side == "client" else ends[::-1]
        await lost.send("before")
        assert await received(other) == "before"
        lost.transport.abort()
        want = (1001, "The client was lost.")
        assert await closed(other) == (
            want if side == "client" else (1011, "The upstream server was lost.")
        )


@SIDES
async def test_websocket_counts_until_it_is_gone(
    side: Side, upstream: Upstream, lastword: StartLastword
) -> None:
    """It takes one of ``max_streams``; one that upstream broke off is upstream's error."""
    proxy = await lastword(upstream=upstream.url, max_streams=1)
    async with joined(proxy, upstream) as ends:
        lost, other = ends if side == "client" else ends[::-1]
        assert await total(proxy.admin_url, "lastword_stream_slots") == 1
        assert await total(proxy.admin_url, "lastword_active_streams") == 1
        for headers in (HANDSHAKE, []):
            target = REALTIME if headers else "/v1/responses/resp_1"
            refused = await exchange(proxy.url, "GET", target, headers)
            assert (refused.status, refused.values("retry-after")) == (503, [b"1"])
        lost.transport.abort()
        await closed(other)
    await until_total(proxy.admin_url, 0, "lastword_stream_slots")
    assert await total(proxy.admin_url, "lastword_limit_reached_total", limit="max_streams") == 2
    broken = await total(proxy.admin_url, "lastword_upstream_errors_total", kind="broken")
    assert broken == await total(proxy.admin_url, "lastword_upstream_errors_total")
    assert broken == (side == "upstream")
    async with joined(proxy, upstream):
        assert await total(proxy.admin_url, "lastword_stream_slots") == 1


@SIDES
async def test_side_that_breaks_the_protocol_is_told_so(
    side: Side, upstream: Upstream, lastword: StartLastword
) -> None:
    """Garbage instead of a frame: 1002 to the one who sent it, and the other is let go."""
    proxy = await lastword(upstream=upstream.url)
    async with joined(proxy, upstream) as ends:
        bad, other = ends if side == "client" else ends[::-1]
        bad.transport.write(b"\xff\xff\xff\xff")
        assert (await closed(bad))[0] == 1002
        code, reason = await closed(other)
        assert code == (1001 if side == "client" else 1011)
        assert "broke the WebSocket protocol" in reason


@SIDES
async def test_pings_are_answered_at_each_side(
    side: Side, upstream: Upstream, lastword: StartLastword
) -> None:
    """A ping gets its pong from the proxy, also while the other side reads nothing."""
    proxy = await lastword(upstream=upstream.url)
    async with joined(proxy, upstream) as ends:
        asking, other = ends if side == "client" else ends[::-1]
        other.transport.pause_reading()
        async with asyncio.timeout(PATIENCE_S):
            await (await asking.ping(b"moby"))


async def stalled(connection: Connection, message: bytes, enough: int) -> int:
    """Send until nothing more is taken; say how many went. ``enough`` means there is no stall."""
    sent = 0
    while sent < enough:
        try:
            async with asyncio.timeout(0.5):  # one that only looks stalled makes a weaker test
                await connection.send(b"%08d" % sent + message)
        except TimeoutError:
            return sent + 1  # it lies in the sender's buffer
        sent += 1
    return sent


@SIDES
async def test_receiver_that_does_not_read_stops_the_sender(
    side: Side, upstream: Upstream, lastword: StartLastword
) -> None:
    """What nobody takes stays with its sender, not in the proxy; then all of it comes, in order."""
    proxy = await lastword(upstream=upstream.url)
    message = b"x" * 100_000
    async with joined(proxy, upstream, compression=None) as ends:
        sender, receiver = ends if side == "client" else ends[::-1]
        receiver.transport.pause_reading()
        sent = await stalled(sender, message, enough=1000)
        assert sent < 400, "100 MB went, so somebody held them"
        receiver.transport.resume_reading()
        for number in range(sent):
            assert await received(receiver) == b"%08d" % number + message
        await sender.send("last")
        assert await received(receiver) == "last"


async def test_held_side_is_not_taken_for_dead(
    upstream: Upstream, lastword: StartLastword, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender whose bytes the proxy does not read cannot show that it lives, and need not."""
    monkeypatch.setattr(websocket_peer, "PING_S", 0.1)
    proxy = await lastword(upstream=upstream.url)
    message = b"x" * 100_000
    async with joined(proxy, upstream, compression=None) as (client, server):
        server.transport.pause_reading()
        sent = await stalled(client, message, enough=1000)  # stalls for five pings
        server.transport.resume_reading()
        for number in range(sent):
            assert await received(server) == b"%08d" % number + message


@SIDES
async def test_dead_side_is_noticed(
    side: Side, upstream: Upstream, lastword: StartLastword, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A side that answers no ping is given up, and the other is told."""
    monkeypatch.setattr(websocket_peer, "PING_S", 0.2)
    proxy = await lastword(upstream=upstream.url)
    async with joined(proxy, upstream) as ends:
        dead, other = ends if side == "client" else ends[::-1]
        dead.transport.pause_reading()
        assert await closed(other) == (
            (1001, "The client did not answer a ping.")
            if side == "client"
            else (1011, "The upstream server did not answer a ping.")
        )


async def test_side_that_takes_nothing_is_cut_after_the_write_stall(
    upstream: Upstream, lastword: StartLastword, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``write_stall_s`` holds for WebSockets too."""
    monkeypatch.setattr(websocket_peer, "PING_S", 0.1)
    proxy = await lastword(upstream=upstream.url, write_stall_s=0.2)
    async with joined(proxy, upstream, compression=None) as (client, server):
        client.transport.pause_reading()
        with contextlib.suppress(ConnectionClosed):
            for _ in range(1000):
                await server.send(b"x" * 100_000)
        assert await closed(server) == (1001, "The client took nothing any more.")


async def test_frames_that_come_with_the_handshake_are_kept(
    upstream: Upstream, lastword: StartLastword
) -> None:
    """A client that does not wait for the 101 loses nothing."""
    proxy = await lastword(upstream=upstream.url)
    hello, more = (Frame(Opcode.TEXT, text).serialize(mask=True) for text in (b"hello", b"more"))
    head = "".join(f"{name}: {value}\r\n" for name, value in [("Host", "x"), *HANDSHAKE])
    async with connect(proxy.url) as wire:
        await wire.send(f"GET {REALTIME} HTTP/1.1\r\n{head}\r\n".encode() + hello + more[:3])
        assert (await wire.head()).status == 101
        server = await upstream.accept()
        assert await received(server) == "hello"
        await wire.send(more[3:])
        assert await received(server) == "more"
        server.transport.abort()


async def test_nothing_is_compressed(upstream: Upstream, lastword: StartLastword) -> None:
    """No extension passes or is agreed to: each would be between one side and the proxy."""
    proxy = await lastword(upstream=upstream.url)
    async with joined(proxy, upstream, compression="deflate") as (client, server):
        assert client.request is not None
        assert "Sec-WebSocket-Extensions" in client.request.headers
        assert server.request is not None
        assert "Sec-WebSocket-Extensions" not in server.request.headers
        assert client.protocol.extensions == server.protocol.extensions == []


@pytest.mark.parametrize(
    ("spoken", "chosen"), [(["b", "a"], "b"), (["a"], "a"), ([], None)], ids=str
)
async def test_upstream_chooses_the_subprotocol(
    spoken: list[str], chosen: str | None, no_task_left: None, lastword: StartLastword
) -> None:
    """The client's offers go up, upstream's choice comes down, or none."""

    def choose(_: object, offered: list[str]) -> str | None:
        assert offered == ["a", "b"]
        return spoken[0] if spoken else None

    async with websocket_upstream(subprotocols=["a", "b"], select_subprotocol=choose) as upstream:
        proxy = await lastword(upstream=upstream.url)
        async with joined(proxy, upstream, subprotocols=["a", "b"]) as (client, server):
            assert client.subprotocol == server.subprotocol == chosen


async def test_upstream_over_tls(
    no_task_left: None, lastword: StartLastword, tmp_path: Path
) -> None:
    """An https upstream is spoken to over TLS, and verified: without its authority it is 502."""
    server_tls, _ = tls_contexts(tmp_path)
    async with websocket_upstream(ssl=server_tls) as upstream:
        proxy = await lastword(upstream=upstream.url, upstream_ca_file=tmp_path / "upstream.pem")
        refused = await exchange(proxy.url, "GET", REALTIME, HANDSHAKE)
        assert refused.status == 502
        proxy.gateway.client._transport._server_hostname = TLS_NAME  # type: ignore[attr-defined]
        async with joined(proxy, upstream) as (client, server):
            await client.send(b"x" * 1_000_000)
            assert await received(server) == b"x" * 1_000_000
            await server.send("back")
            assert await received(client) == "back"
            await server.close(4000, "done")
            assert await closed(client) == (4000, "done")


async def test_drain_refuses_new_and_closes_old_ones(
    upstream: Upstream, lastword: StartLastword
) -> None:
    """While it drains a handshake is 503; what is open goes on, and is closed with 1001."""
    proxy = await lastword(upstream=upstream.url)
    async with joined(proxy, upstream) as (client, server):
        stopping = asyncio.create_task(proxy.gateway.shut_down())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        refused = await exchange(proxy.url, "GET", REALTIME, HANDSHAKE)
        assert (refused.status, refused.values("retry-after")) == (503, [b"1"])
        await client.send("still here")
        assert await received(server) == "still here"
        proxy.gateway.drain.hurry()  # type: ignore[attr-defined]  # instead of the grace
        want = (1001, "The proxy is shutting down.")
        assert await closed(client) == await closed(server) == want
        await stopping


async def test_client_that_leaves_is_told_to_upstream_when_the_proxy_is_busy_sending(
    upstream: Upstream, lastword: StartLastword
) -> None:
    """A client that resets while upstream streams to it ends upstream's stream too."""
    proxy = await lastword(upstream=upstream.url)
    async with dial(proxy) as client:
        server = await upstream.accept()

        async def stream() -> None:
            while True:
                await server.send(b"x" * 10_000)

        streaming = asyncio.create_task(stream())
        await received(client)
        client.transport.abort()
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(streaming, PATIENCE_S)
