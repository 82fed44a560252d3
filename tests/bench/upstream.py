"""An upstream that streams vLLM-shaped events on a schedule, each delta with its send time.

`python -m tests.bench.upstream` prints its port and serves until SIGTERM.  The request's body
says what is wanted: `max_output_tokens` deltas, `metadata.rate` of them in a second, or all as
fast as they are taken if that is 0.  It always ends as vLLM does when the tokens run out: a
`response.completed` whose status is `incomplete`.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import sys
import time
from typing import TYPE_CHECKING, Final, cast

import httptools
import msgspec
import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable

EVENTS_AROUND: Final = 8
"""How many events a stream has beside its deltas."""

_BURST_EVENTS: Final = 16  # written before other streams get their turn
_GOLDEN: Final = 0.6180339887498949  # spreads the streams evenly over one period
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 15:16:40 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_SMALL: Final = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: 2\r\n"
    b"content-type: application/json\r\n\r\n{}"
)
_RESPONSE: Final = (
    '{"response":{"id":"resp_%(n)016x","created_at":1795965400,"incomplete_details":%(details)s,'
    '"instructions":null,"metadata":null,"model":"bench","object":"response","output":%(output)s,'
    '"parallel_tool_calls":true,"temperature":0.0,"tool_choice":"none","tools":[],"top_p":1.0,'
    '"background":false,"max_output_tokens":%(tokens)d,"max_tool_calls":null,'
    '"previous_response_id":null,"prompt":null,"reasoning":null,"service_tier":"auto",'
    '"status":"%(status)s","text":null,"top_logprobs":null,"truncation":"disabled",'
    '"usage":null,"user":null,"presence_penalty":0.0,"frequency_penalty":0.0,'
    '"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,'
    '"output_messages":null},"sequence_number":%(number)d,"type":"%(type)s"}'
)
_ITEM: Final = (
    '{"id":"msg_%(n)016x","content":[%(content)s],"role":"assistant","status":"%(status)s",'
    '"type":"message","phase":null}'
)
_PART: Final = '{"annotations":[],"text":"%s","type":"output_text","logprobs":null}'


class Wanted(msgspec.Struct):
    """What a request asks for."""

    class Metadata(msgspec.Struct):
        """Where OpenAI's API lets a client say what it likes."""

        rate: str = "0"

    max_output_tokens: int
    metadata: Metadata = msgspec.field(default_factory=Metadata)


class _Stream:
    """The bytes of one stream, prepared, and where it stands."""

    def __init__(self, write: Callable[[bytes], None], number: int, wanted: Wanted) -> None:
        self._write = write
        self._number = number
        self._tokens = wanted.max_output_tokens
        self._sent = 0
        rate = float(wanted.metadata.rate)
        self._period = 1 / rate if rate else 0.0
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + self._period * (1 + number * _GOLDEN % 1)
        self._timer: asyncio.Handle | None = None
        # Only the send time and the number change from one delta to the next.
        self._before = b'event: response.output_text.delta\ndata: {"content_index":0,"delta":"'
        self._after = b'","item_id":"msg_%016x","logprobs":[],"output_index":0,' % number
        write(_HEAD + self._lead())
        self.go_on()

    def go_on(self) -> None:
        """Take up the schedule, at the start and after a pause."""
        if self._timer is not None:
            return
        if self._period:
            self._timer = self._loop.call_at(self._due, self._tick)
        else:
            self._timer = self._loop.call_soon(self._burst)

    def stop(self) -> None:
        """Send nothing more for now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        self._send_delta()
        if self._sent < self._tokens:
            self._due += self._period
            self._timer = self._loop.call_at(self._due, self._tick)
        else:
            self._write(self._tail())

    def _burst(self) -> None:
        self._timer = None
        for _ in range(min(_BURST_EVENTS, self._tokens - self._sent)):
            self._send_delta()
        if self._sent < self._tokens:
            self._timer = self._loop.call_soon(self._burst)
        else:
            self._write(self._tail())

    def _send_delta(self) -> None:
        block = b'%b%019d%b"sequence_number":%d,"type":"response.output_text.delta"}\n\n' % (
            self._before,
            time.monotonic_ns(),
            self._after,
            self._sent + 4,
        )
        self._sent += 1
        self._write(b"%x\r\n%b\r\n" % (len(block), block))

    def _lead(self) -> bytes:
        item = _ITEM % {"n": self._number, "content": "", "status": "in_progress"}
        return (
            self._state(0, "response.created", "in_progress")
            + self._state(1, "response.in_progress", "in_progress")
            + _chunk("response.output_item.added", f'"item":{item},"output_index":0', 2)
            + _chunk(
                "response.content_part.added",
                f'"content_index":0,"item_id":"msg_{self._number:016x}","output_index":0,'
                f'"part":{_PART % ""}',
                3,
            )
        )

    def _tail(self) -> bytes:
        number = self._tokens + 4
        place = f'"content_index":0,"item_id":"msg_{self._number:016x}","output_index":0'
        item = _ITEM % {"n": self._number, "content": _PART % "text", "status": "completed"}
        return (
            _chunk("response.output_text.done", f'{place},"logprobs":[],"text":"text"', number)
            + _chunk("response.content_part.done", f'{place},"part":{_PART % "text"}', number + 1)
            + _chunk("response.output_item.done", f'"item":{item},"output_index":0', number + 2)
            + self._state(number + 3, "response.completed", "incomplete", f"[{item}]")
            + b"0\r\n\r\n"
        )

    def _state(self, number: int, kind: str, status: str, output: str = "[]") -> bytes:
        payload = _RESPONSE % {
            "n": self._number,
            "details": '{"reason":"max_output_tokens"}' if status == "incomplete" else "null",
            "output": output,
            "tokens": self._tokens,
            "status": status,
            "number": number,
            "type": kind,
        }
        return _framed(kind, payload)


def _chunk(kind: str, members: str, number: int) -> bytes:
    return _framed(kind, f'{{{members},"sequence_number":{number},"type":"{kind}"}}')


def _framed(kind: str, payload: str) -> bytes:
    """Return one event as one HTTP chunk."""
    block = f"event: {kind}\ndata: {payload}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(block), block)


class _Connection(asyncio.Protocol):
    """One connection: its requests one after the other."""

    numbers = itertools.count(1)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, which is none of asyncio's classes under uvloop."""
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._stream: _Stream | None = None

    def data_received(self, data: bytes) -> None:
        """Read requests."""
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop: the client has left."""
        self.pause_writing()

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
        self._body = b""
        self._stream = None

    def on_body(self, body: bytes) -> None:
        """Collect the request's body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answer."""
        if self._parser.get_method() == b"POST":
            wanted = msgspec.json.decode(self._body, type=Wanted)
            self._stream = _Stream(self._transport.write, next(self.numbers), wanted)
        else:
            self._transport.write(_SMALL)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    server = await loop.create_server(_Connection, "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    gc.disable()  # a collection would look like a stall of the server under test
    await stop.wait()
    server.close()


if __name__ == "__main__":
    uvloop.run(_serve())
