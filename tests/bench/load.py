"""A client that holds many event streams and times each event on its way.

`python -m tests.bench.load PLAN` takes a ``Plan`` as JSON and prints a ``Report``.  It reads the
server's CPU time together with its own count of events, so that one belongs to the other.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Final, cast

import httptools
import msgspec
import uvloop

from tests.bench.processes import core_busy_s, cpu_s
from tests.bench.upstream import EVENTS_AROUND

_SETTLE_S: Final = 0.3
_OPEN_STEP_S: Final = 0.002
_STAMP: Final = re.compile(rb'"delta":"(\d{19})"')
_TYPE: Final = re.compile(rb'"type": ?"([a-z_.]+)"\}?\s*$')
_EVENT_FIELD: Final = re.compile(rb"event: ?([a-z_.]+)")


class Plan(msgspec.Struct):
    """What to do, and whom to watch.

    Times are in seconds.  ``rate`` is events per second and stream; 0 is a burst of ``events``
    in each stream, measured from its first request to its last byte.
    """

    port: int
    streams: int
    rate: float
    seconds: float
    limit_s: float
    server_pids: list[int]
    upstream_pid: int
    server_core: int
    load_core: int
    events: int = 0

    @property
    def opening_s(self) -> float:
        """How long opening the streams one after the other takes."""
        return self.streams * _OPEN_STEP_S

    @property
    def deltas(self) -> int:
        """How many deltas each stream must have to last for the whole measurement."""
        if not self.rate:
            return self.events
        return round(self.rate * (self.opening_s + 2 * _SETTLE_S + self.seconds + 0.2))


class Report(msgspec.Struct):
    """What was seen.

    ``events``, delays and all CPU figures belong to the measured window, ``lost`` to the whole
    run.  The first byte is the body's, counted from the request's write.
    """

    window_s: float
    events: int
    server_cpu_s: float
    upstream_cpu_s: float
    client_cpu_s: float
    server_core_busy_s: float
    load_core_busy_s: float
    delay_p50_ms: float
    delay_p99_ms: float
    delay_max_ms: float
    first_byte_p50_ms: float
    first_byte_p99_ms: float
    lost: int
    ended: int
    corrected: int
    last_events: dict[str, int]


class _Tally:
    """What all streams together have seen."""

    def __init__(self, streams: int) -> None:
        self.sent = array("q")
        self.received = array("q")
        self.events = 0
        self.first_bytes: list[int] = []
        self.last_events: Counter[str] = Counter()
        self.ended = 0
        self.opened = _Countdown(streams)
        self.gone = _Countdown(streams)


class _Countdown:
    """A future that is done after so many calls."""

    def __init__(self, count: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = count

    def step(self) -> None:
        """Count one."""
        self._left -= 1
        if not self._left and not self.done.done():
            self.done.set_result(None)


class _Stream(asyncio.Protocol):
    """One connection, one request, one stream."""

    def __init__(self, request: bytes, tally: _Tally) -> None:
        self._request = request
        self._tally = tally
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # llhttp calls it without a Python frame
        self._parser = httptools.HttpResponseParser(self)
        self._half = b""
        self._last = b""
        self._asked_at = 0
        self._heard = False
        self._whole = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the stream."""
        self._transport = cast("asyncio.Transport", transport)
        self._asked_at = time.monotonic_ns()
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
            tally.first_bytes.append(now - self._asked_at)
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
        tally.events += body.count(b"\ndata: ")
        if body:
            self._last = body

    def on_message_complete(self) -> None:
        """Note the proper end."""
        self._whole = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Judge how the stream ended."""
        tally = self._tally
        tally.last_events[self._last_event()] += 1
        tally.ended += self._whole
        if not self._heard:
            tally.opened.step()
        tally.gone.step()

    def _last_event(self) -> str:
        """Return the last event's name where its field and its type agree, else both."""
        block = self._last.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
        field, kind = _EVENT_FIELD.match(block), _TYPE.search(block)
        says = [found[1].decode() if found else "none" for found in (field, kind)]
        return says[0] if says[0] == says[1] else " / ".join(says)


@dataclass(frozen=True)
class _Mark:
    """One moment: how many events had come, and what had been spent."""

    at_ns: int
    events: int
    server_cpu_s: float
    upstream_cpu_s: float
    client_cpu_s: float
    server_core_busy_s: float
    load_core_busy_s: float

    @classmethod
    def now(cls, plan: Plan, tally: _Tally) -> _Mark:
        return cls(
            time.monotonic_ns(),
            tally.events,
            cpu_s(plan.server_pids),
            cpu_s([plan.upstream_pid]),
            time.process_time(),
            core_busy_s(plan.server_core),
            core_busy_s(plan.load_core),
        )


def _request(plan: Plan) -> bytes:
    body = (
        b'{"model":"bench","input":"Count.","stream":true,"background":true,"max_output_tokens":%d,'
        b'"metadata":{"rate":"%g"}}' % (plan.deltas, plan.rate)
    )
    return (
        b"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAuthorization: Bearer bench\r\n"
        b"Accept: text/event-stream\r\nContent-Type: application/json\r\n"
        b"User-Agent: bench\r\nContent-Length: %d\r\n\r\n%b" % (plan.port, len(body), body)
    )


async def _measure(plan: Plan) -> Report:
    loop = asyncio.get_running_loop()
    tally = _Tally(plan.streams)
    request = _request(plan)
    begin = end = _Mark.now(plan, tally)
    try:
        async with asyncio.timeout(plan.limit_s):
            first = loop.time()
            for number in range(plan.streams):
                await loop.create_connection(
                    lambda: _Stream(request, tally), "127.0.0.1", plan.port
                )
                if plan.rate:
                    await asyncio.sleep(first + (number + 1) * _OPEN_STEP_S - loop.time())
            if plan.rate:
                await tally.opened.done
                await asyncio.sleep(_SETTLE_S)
                begin = _Mark.now(plan, tally)
                await asyncio.sleep(plan.seconds)
                end = _Mark.now(plan, tally)
                await tally.gone.done
            else:
                await tally.gone.done
                end = _Mark.now(plan, tally)
    except TimeoutError:
        sys.stderr.write("the time limit was reached: what had not come counts as lost\n")
    return _report(plan, tally, begin, end)


def _report(plan: Plan, tally: _Tally, begin: _Mark, end: _Mark) -> Report:
    delays = sorted(
        received - sent
        for sent, received in zip(tally.sent, tally.received, strict=True)
        if begin.at_ns <= received <= end.at_ns
    )
    first_bytes = sorted(tally.first_bytes)
    return Report(
        window_s=(end.at_ns - begin.at_ns) / 1e9,
        events=end.events - begin.events,
        server_cpu_s=end.server_cpu_s - begin.server_cpu_s,
        upstream_cpu_s=end.upstream_cpu_s - begin.upstream_cpu_s,
        client_cpu_s=end.client_cpu_s - begin.client_cpu_s,
        server_core_busy_s=end.server_core_busy_s - begin.server_core_busy_s,
        load_core_busy_s=end.load_core_busy_s - begin.load_core_busy_s,
        delay_p50_ms=_quantile_ms(delays, 0.5),
        delay_p99_ms=_quantile_ms(delays, 0.99),
        delay_max_ms=_quantile_ms(delays, 1),
        first_byte_p50_ms=_quantile_ms(first_bytes, 0.5),
        first_byte_p99_ms=_quantile_ms(first_bytes, 0.99),
        lost=plan.streams * (plan.deltas + EVENTS_AROUND) - tally.events,
        ended=tally.ended,
        corrected=tally.last_events["response.incomplete"],
        last_events=dict(tally.last_events),
    )


def _quantile_ms(ordered: list[int], share: float) -> float:
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1e6


def main() -> None:
    """Do what the first argument says."""
    if os.sched_getscheduler(0) == os.SCHED_RR:
        # Before the upstream on their core: an event is seen when it comes, not after a batch.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
    gc.disable()  # a collection would look like a stall of the server under test
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(_measure(plan))))


if __name__ == "__main__":
    main()
