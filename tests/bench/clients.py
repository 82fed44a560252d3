"""Clients that are cheap enough not to be the limit: one connection, one request, one stream."""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Final, cast

import httptools
import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

OPEN_STEP_S: Final = 0.002
"""Streams are opened one after the other, so long apart."""

_STAMP: Final = re.compile(rb'"(?:delta|content)": ?"(\d{19})"')  # of Responses and of chat streams
_DONE: Final = b"data: [DONE]\n\n"


class Tally:
    """What a group of streams has seen.

    ``event_start`` is how an event's data begins: with the object's brace, so that a server's own
    `[DONE]` is not counted, or without, where it belongs to the stream.
    """

    def __init__(self, streams: int, *, event_start: bytes = b"data: {") -> None:
        self.event_start = event_start
        self.sent = array("q")
        self.received = array("q")
        self.events = 0
        self.last_events: Counter[str] = Counter()
        self.opened = Countdown(streams)
        self.gone = Countdown(streams)

    def delays(self, begin_ns: int, end_ns: int) -> list[int]:
        """Return how long the deltas took that came between two moments, in nanoseconds."""
        return [
            received - sent
            for sent, received in zip(self.sent, self.received, strict=True)
            if begin_ns <= received <= end_ns
        ]


class Countdown:
    """A future that is done after so many calls."""

    def __init__(self, count: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = count

    def step(self) -> None:
        """Count one."""
        self._left -= 1
        if not self._left and not self.done.done():
            self.done.set_result(None)


class TimedStream(asyncio.Protocol):
    """A stream whose every delta is timed."""

    def __init__(self, request: bytes, tally: Tally) -> None:
        self._request = request
        self._tally = tally
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # llhttp calls it without a Python frame
        self._parser = httptools.HttpResponseParser(self)
        self._half = b""
        self._last = b""
        self._heard = False
        self._whole = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the stream."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note when each event came."""
        now = time.monotonic_ns()
        self._parser.feed_data(data)
        if self._whole:
            self._transport.close()
        pieces = self._pieces
        if not pieces:
            return
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        tally = self._tally
        if not self._heard:
            self._heard = True
            tally.opened.step()
        if self._half:
            body = self._half + body
            self._half = b""
        if not body.endswith(b"\n\n"):
            end = body.rfind(b"\n\n") + 2 if b"\n\n" in body else 0
            self._half = body[end:]
            body = body[:end]
        for stamp in _STAMP.findall(body):
            tally.sent.append(int(stamp))
            tally.received.append(now)
        tally.events += body.count(tally.event_start)
        if body and body != _DONE:
            self._last = body

    def on_message_complete(self) -> None:
        """Note the proper end."""
        self._whole = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Judge how the stream ended."""
        self._tally.last_events[last_event(self._last, whole=self._whole)] += 1
        if not self._heard:
            self._tally.opened.step()
        self._tally.gone.step()


class WholeStream(asyncio.Protocol):
    """A stream that is only kept, to be looked at when nothing is timed any more."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)
        self._asked_at = 0
        self._whole = False
        self.took_ns = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def fetch(cls, port: int, request: bytes) -> WholeStream:
        """Send a request and wait for the end of its answer."""
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(lambda: cls(request), "127.0.0.1", port)
        await stream.done
        return stream

    @property
    def body(self) -> bytes:
        """What has come so far."""
        return b"".join(self._pieces)

    @property
    def last_event(self) -> str:
        """How it ended; see ``last_event``."""
        return last_event(self.body, whole=self._whole)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the stream."""
        self._transport = cast("asyncio.Transport", transport)
        self._asked_at = time.monotonic_ns()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Keep what comes."""
        self._parser.feed_data(data)
        if self._whole:
            self._transport.close()

    def on_message_complete(self) -> None:
        """Note the proper end, and when it came."""
        self._whole = True
        self.took_ns = time.monotonic_ns() - self._asked_at

    def connection_lost(self, exc: Exception | None) -> None:
        """Be done, whatever has come."""
        if not self._whole:
            self.took_ns = time.monotonic_ns() - self._asked_at
        if not self.done.done():
            self.done.set_result(None)


class _Named(msgspec.Struct):
    """What names an event: the type of a Responses event, the object of a chat chunk."""

    type: str | None = None
    object: str | None = None


def last_event(body: bytes, *, whole: bool) -> str:
    """Return the name of the last event in a body that ends in whole events.

    Its `event:` field and its JSON's type, if they differ both; "cut" goes before the name where
    the HTTP message did not end.  A `[DONE]` behind the last event does not count.
    """
    field, data = "", b""
    for line in body.removesuffix(_DONE).removesuffix(b"\n\n").rpartition(b"\n\n")[2].split(b"\n"):
        member, _, value = line.partition(b":")
        if member == b"event":
            field = value.strip().decode()
        elif member == b"data":
            data = value
    try:
        named = msgspec.json.decode(data, type=_Named)
        kind = named.type or named.object or "unnamed"
    except msgspec.MsgspecError:
        kind = "no JSON"
    name = kind if field in ("", kind) else f"{field} / {kind}"
    return name if whole else f"cut {name}"


async def open_streams(
    port: int, count: int, make: Callable[[], asyncio.Protocol], step_s: float = OPEN_STEP_S
) -> None:
    """Open streams one after the other, each on a connection of its own."""
    loop = asyncio.get_running_loop()
    first = loop.time()
    for number in range(count):
        await loop.create_connection(make, "127.0.0.1", port)
        await asyncio.sleep(max(0.0, first + (number + 1) * step_s - loop.time()))


def post(path: bytes, body: bytes) -> bytes:
    """Return a POST as an SDK sends it."""
    return (
        b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer bench\r\n"
        b"Accept: text/event-stream\r\nContent-Type: application/json\r\n"
        b"User-Agent: bench\r\nContent-Length: %d\r\n\r\n%b" % (path, len(body), body)
    )


def get(path: bytes) -> bytes:
    """Return a GET as an SDK sends it."""
    return (
        b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer bench\r\n"
        b"Accept: text/event-stream\r\nUser-Agent: bench\r\n\r\n" % path
    )
