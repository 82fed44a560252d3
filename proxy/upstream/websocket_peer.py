"""One side of a relayed WebSocket: frames in from its socket, out on the other side's.

The library parses, masks and judges the frames (RFC 6455), without I/O. Why no connection class of
its own or of uvicorn's: those gather whole messages, wake a task for each, and take a peer for dead
that is only being held back.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from websockets.exceptions import PayloadTooBig
from websockets.frames import Close, CloseCode, Frame, Opcode
from websockets.protocol import SEND_EOF, State

if TYPE_CHECKING:
    from websockets.protocol import Protocol

__all__ = ["FRAME_LIMITS", "QUIET", "WebSocketPeer", "join"]

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
"""The longest message that vLLM's own server takes. A longer one may come in several frames."""
FRAME_LIMITS: Final = (None, MAX_FRAME_BYTES)
PING_S = 20.0
"""How long a side may be silent before it is pinged; after as long again it is given up."""
CLOSE_S = 10.0
"""How long a closed connection may take to end, once nothing more goes out."""

# At level DEBUG the library writes headers and messages, and these are nobody's business.
QUIET: Final = logging.getLogger("lastword.websocket")
QUIET.setLevel(logging.WARNING)


class WebSocketPeer(asyncio.Protocol):
    """A socket that speaks WebSocket, behind its handshake.

    Frames go to the other side as they come: a message takes no more memory than its longest
    frame, and what the other side does not take is not read. Pings are answered here. ``lost`` is
    done when the socket is gone; ``failure`` says what the other side had to be told (with
    ``loss_code``) because no close frame had come.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        protocol: Protocol,
        *,
        who: str,
        loss_code: CloseCode,
        stall_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._protocol = protocol
        self._who = who
        self._loss_code = loss_code
        self._stall_s = stall_s
        self._other = self
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self.failure: str | None = None
        self._held = False  # not read, since the other side is full
        self._full = False
        self._owed_pong = b""
        self._heard = True
        self._unsent = 0
        self._silent_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ending = False

    def attach(self, other: WebSocketPeer) -> None:
        """Take the socket over from whoever did the handshake."""
        self._other = other
        self._transport.set_protocol(self)

    def start(self, early: bytes = b"") -> None:
        """Relay what had come with the handshake (``early``: what is not parsed), then read."""
        if self._transport.is_closing():  # lost in between, and told to the former owner
            self._loop.call_soon(self.connection_lost, None)
            return
        if not self._ending:  # a close frame may have come with the other's handshake
            self._timer = self._loop.call_later(PING_S, self._check)
        self._transport.resume_reading()
        self.data_received(early)

    def close(self, code: int, reason: str) -> bool:
        """Send a close frame and wait a while for the answer; False if it was sent before."""
        if self._protocol.state is not State.OPEN:
            return False
        if code == CloseCode.NO_STATUS_RCVD:
            self._protocol.send_close()
        else:
            self._protocol.send_close(code, reason)
        self.flush()
        self.hold(False)
        return True

    def abort(self) -> None:
        """Cut the connection."""
        self._transport.abort()

    def send(self, frame: Frame) -> None:
        """Have a frame of the other side ready for ``flush``; once closing, this side gets none."""
        protocol = self._protocol
        if protocol.state is not State.OPEN:
            return
        match frame.opcode:
            case Opcode.TEXT:
                protocol.send_text(frame.data, frame.fin)
            case Opcode.BINARY:
                protocol.send_binary(frame.data, frame.fin)
            case Opcode.CONT:
                protocol.send_continuation(frame.data, frame.fin)
            case Opcode.CLOSE:
                close = Close.parse(frame.data)
                self.close(close.code, close.reason)

    def flush(self) -> None:
        """Write what is ready, and the end of the connection where the protocol says so."""
        writes = self._protocol.data_to_send()
        if data := b"".join(writes):
            self._transport.write(data)
        if writes and writes[-1] == SEND_EOF:
            self._transport.close()
        if self._protocol.close_expected() and not self._ending:
            self._ending = True
            self._expect_end()

    def hold(self, held: bool) -> None:  # noqa: FBT001 - the verb says what is true
        """Leave this side's bytes in its socket, or read on; a closing one is read."""
        if held is self._held or (held and self._protocol.state is not State.OPEN):
            return
        self._held = held
        if self._transport.is_closing():
            return
        if held:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # The callbacks of asyncio.

    def data_received(self, data: bytes) -> None:
        """Relay the frames of one read."""
        self._heard = True
        protocol = self._protocol
        protocol.receive_data(data)
        if self._full and protocol.writes and protocol.state is State.OPEN:
            # Pongs for one that pings and does not read: the last one does (RFC 6455, 5.5.3).
            self._owed_pong = protocol.data_to_send()[-1]
        else:
            self.flush()
        for event in protocol.events_received():
            if isinstance(event, Frame):
                self._other.send(event)
        self._other.flush()
        if protocol.parser_exc is not None:
            self._give_up(
                f"sent a frame of more than {MAX_FRAME_BYTES} bytes"
                if isinstance(protocol.parser_exc, PayloadTooBig)
                else "broke the WebSocket protocol"
            )

    def eof_received(self) -> None:
        """Let the transport close; a close frame came before or never will."""
        self._protocol.receive_eof()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - gone is gone
        """End the other side too."""
        if self.lost.done():
            return
        self.lost.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        self._protocol.receive_eof()
        self._give_up("was lost")

    def pause_writing(self) -> None:
        """Hold the other side back."""
        self._full = True
        self._other.hold(True)

    def resume_writing(self) -> None:
        """Let the other side go on."""
        self._full = False
        if self._owed_pong and self._protocol.state is State.OPEN:
            self._transport.write(self._owed_pong)
        self._owed_pong = b""
        self._other.hold(False)

    def _give_up(self, why: str) -> None:
        """Tell the other side, if it does not know, that no close frame will come."""
        sentence = f"{self._who} {why}."
        if self._other.close(self._loss_code, sentence):
            self.failure = sentence

    def _check(self) -> None:
        """Look whether this side lives: it says something, takes something, or is held back."""
        assert self._timer is not None  # noqa: S101 - it has called
        now = self._loop.time()
        unsent = self._transport.get_write_buffer_size()
        late = now - self._timer.when() > PING_S / 2  # it may have spoken while nobody listened
        if self._heard or self._held or late or unsent < self._unsent:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
            if not self._full:
                self._protocol.send_ping(b"")
                self.flush()
        elif now - self._silent_since >= (self._stall_s if self._full else 0):
            self._give_up("took nothing any more" if self._full else "did not answer a ping")
            self.abort()
            return
        self._heard = False
        self._unsent = unsent
        self._timer = self._loop.call_later(PING_S, self._check)

    def _expect_end(self) -> None:
        """Cut the connection if it does not end although both sides should know that it is over."""
        if self._timer is not None:
            self._timer.cancel()
        unsent = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(CLOSE_S, self._end, unsent)

    def _end(self, unsent: int) -> None:
        if self._transport.get_write_buffer_size() < unsent:
            self._expect_end()
        else:
            self._transport.abort()


async def join(client: WebSocketPeer, upstream: WebSocketPeer, early: bytes) -> None:
    """Relay between two sides until both sockets are gone; when cancelled, cut both.

    ``early`` is what the client had sent behind its handshake.
    """
    try:
        client.attach(upstream)
        upstream.attach(client)
        client.start(early)
        upstream.start()
        await asyncio.wait([client.lost, upstream.lost])
    finally:
        client.abort()
        upstream.abort()
