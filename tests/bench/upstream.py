"""An upstream that streams vLLM-shaped events on a schedule, each delta with its send time.

`python -m tests.bench.upstream` prints its port and serves until SIGTERM.  The request's body
says what is wanted (``Wanted``).  `GET /release` lets all held streams end.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import sys
import time
from typing import TYPE_CHECKING, ClassVar, Final, cast

import httptools
import msgspec
import uvloop

from tests.bench.vllm_events import HEAD, ChatEvents, Events, ResponseEvents

if TYPE_CHECKING:
    from collections.abc import Callable

RELEASE: Final = b"/release"
"""The path that ends all held streams."""

_BURST_EVENTS: Final = 16  # written before other streams get their turn
_GOLDEN: Final = 0.6180339887498949  # spreads the streams evenly over one period
_CHAT: Final = b"/v1/chat/completions"
ANSWER: Final = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1795965400,"model":"bench",'
    b'"choices":[{"index":0,"message":{"role":"assistant","content":"A whale is a mammal."},'
    b'"logprobs":null,"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":4,"total_tokens":10,"completion_tokens":6}}'
)
_SMALL: Final = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 15:16:40 GMT\r\nserver: uvicorn\r\n"
    b"content-length: %d\r\ncontent-type: application/json\r\n\r\n%b" % (len(ANSWER), ANSWER)
)


class Metadata(msgspec.Struct):
    """How to stream; OpenAI's API lets a client put strings here as it likes."""

    rate: float = 0.0
    """Deltas per second; 0: all as fast as they are taken."""
    held: bool = False
    """After the lead wait for `GET /release`."""
    logprobs_bytes: int = 0
    """The least size of the last event."""


class Wanted(msgspec.Struct):
    """What a request asks for."""

    stream: bool = False
    max_output_tokens: int = 0
    max_tokens: int = 0
    metadata: Metadata = msgspec.field(default_factory=Metadata)

    @property
    def tokens(self) -> int:
        """How many deltas, whatever the route calls them."""
        return self.max_output_tokens or self.max_tokens


class _Stream:
    """Where one stream stands."""

    held: ClassVar[set[_Stream]] = set()

    def __init__(
        self, write: Callable[[bytes], None], number: int, events: Events, wanted: Wanted
    ) -> None:
        self._write = write
        self._events = events
        self._tokens = wanted.tokens
        self._texts: list[bytes] = []
        self._tail = events.tail(self._texts)
        rate = wanted.metadata.rate
        self._period = 1 / rate if rate else 0.0
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + self._period * (1 + number * _GOLDEN % 1)
        self._timer: asyncio.Handle | None = None
        self._waits = wanted.metadata.held
        write(HEAD + events.lead())
        if self._waits:
            self.held.add(self)
        self.go_on()

    @classmethod
    def release(cls) -> None:
        """Let all held streams end."""
        while cls.held:
            cls.held.pop().go_on()

    def go_on(self) -> None:
        """Take up the schedule, at the start and after a pause."""
        self._waits = self in self.held
        self._schedule()

    def stop(self) -> None:
        """Send nothing more for now."""
        self._waits = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        if self._waits or self._timer is not None:
            return
        if len(self._texts) == self._tokens:
            self._timer = self._loop.call_soon(self._end)
        elif self._period:
            self._timer = self._loop.call_at(self._due, self._tick)
        else:
            self._timer = self._loop.call_soon(self._burst)

    def _tick(self) -> None:
        self._timer = None
        self._send_delta()
        self._due += self._period
        self._schedule()

    def _burst(self) -> None:
        self._timer = None
        for _ in range(min(_BURST_EVENTS, self._tokens - len(self._texts))):
            self._send_delta()
        self._schedule()

    def _send_delta(self) -> None:
        stamp = b"%019d" % time.monotonic_ns()
        index = len(self._texts)
        self._texts.append(stamp)
        self._write(self._events.delta(index, stamp))

    def _end(self) -> None:
        self._timer = None
        piece = next(self._tail, None)
        if piece is not None:
            self._write(piece)
            self._schedule()


class _Connection(asyncio.Protocol):
    """One connection: its requests one after the other."""

    numbers = itertools.count(1)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, which is none of asyncio's classes under uvloop."""
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpRequestParser(self)
        self._url = self._body = b""
        self._stream: _Stream | None = None

    def data_received(self, data: bytes) -> None:
        """Read requests."""
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop: the client has left."""
        self.pause_writing()
        if self._stream is not None:
            _Stream.held.discard(self._stream)

    def pause_writing(self) -> None:
        """Hold the stream: the other side does not keep up."""
        if self._stream is not None:
            self._stream.stop()

    def resume_writing(self) -> None:
        """Take the schedule up again; what is late follows at once."""
        if self._stream is not None:
            self._stream.go_on()

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._url = self._body = b""
        self._stream = None

    def on_url(self, url: bytes) -> None:
        """Collect the request's target."""
        self._url += url

    def on_body(self, body: bytes) -> None:
        """Collect the request's body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answer."""
        wanted = Wanted()
        if self._body:
            wanted = msgspec.json.decode(self._body, type=Wanted, strict=False)
        if not wanted.stream:
            if self._url == RELEASE:
                _Stream.release()
            self._transport.write(_SMALL)
            return
        number = next(self.numbers)
        events: Events
        if self._url == _CHAT:
            events = ChatEvents(number)
        else:
            events = ResponseEvents(number, wanted.tokens, wanted.metadata.logprobs_bytes)
        self._stream = _Stream(self._transport.write, number, events, wanted)


async def listen() -> asyncio.Server:
    """Serve on a free loopback port until closed."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(_Connection, "127.0.0.1", 0, backlog=4096)


async def _serve() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = await listen()
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    gc.disable()  # a collection would look like a stall of the server under test
    await stop.wait()
    server.close()


if __name__ == "__main__":
    uvloop.run(_serve())
