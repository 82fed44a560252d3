"""Loads of event streams: paced, as a burst, held silent, and beside one very large event."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

import msgspec

from tests.bench.clients import (
    OPEN_STEP_S,
    Tally,
    TimedStream,
    WholeStream,
    get,
    open_streams,
    post,
)
from tests.bench.costs import Mark, quantile_ms
from tests.bench.plans import Burst, Held, LargeEvent, Paced, Report, Where
from tests.bench.probe import first_bytes
from tests.bench.processes import rss_mb
from tests.bench.upstream import RELEASE
from tests.bench.vllm_events import CHAT_EVENTS_AROUND, RESPONSE_EVENTS_AROUND

_SETTLE_S: Final = 0.3
_PROBING_S: Final = 0.7
_LARGE_TOKENS: Final = 10


def stream_request(where: Where, tokens: int, *, chat: bool = False, **metadata: float) -> bytes:
    """Return the request of one stream; ``metadata`` tells the upstream how (its ``Metadata``)."""
    body: dict[str, object] = {"model": "bench", "stream": True}
    if chat:
        body |= {"messages": [{"role": "user", "content": "Count."}], "max_tokens": tokens}
    else:
        body |= {"input": "Count.", "max_output_tokens": tokens}
    if where.background:
        body["background"] = True
    body["metadata"] = {
        name: msgspec.json.encode(value).decode() for name, value in metadata.items()
    }
    path = b"/v1/chat/completions" if chat else b"/v1/responses"
    return post(path, msgspec.json.encode(body))


class _StreamLoad:
    """What all loads of timed streams share: a tally, a window, a report.

    ``run`` may be cancelled at any time; ``report`` then tells what had come.
    """

    def __init__(self, where: Where, streams: int, *, chat: bool = False) -> None:
        self._where = where
        self._streams = streams
        self._chat = chat
        self._tally = Tally(streams, event_start=b"data: " if chat else b"data: {")
        self._begin = self._end = self._mark()
        self._expected_events = 0
        self._figures: dict[str, float] = {}

    def report(self) -> Report:
        """Return what was seen."""
        delays = self._tally.delays(self._begin.at_ns, self._end.at_ns)
        return Report(
            costs=self._begin.costs_until(self._end),
            work=self._end.work - self._begin.work,
            figures={
                "delay_p50_ms": quantile_ms(delays, 0.5),
                "delay_p99_ms": quantile_ms(delays, 0.99),
                "delay_max_ms": quantile_ms(delays, 1),
                **self._figures,
            },
            lost=self._expected_events - self._tally.events,
            last_events=dict(self._tally.last_events),
        )

    def _mark(self) -> Mark:
        return Mark.now(self._where, self._tally.events)

    def _request(self, tokens: int, **metadata: float) -> bytes:
        """Return a request, and expect its events once for every stream."""
        around = CHAT_EVENTS_AROUND if self._chat else RESPONSE_EVENTS_AROUND
        self._expected_events += self._streams * (tokens + around)
        return stream_request(self._where, tokens, chat=self._chat, **metadata)

    async def _open(self, count: int, request: bytes, step_s: float = OPEN_STEP_S) -> None:
        await open_streams(
            self._where.port, count, partial(TimedStream, request, self._tally), step_s
        )


class PacedLoad(_StreamLoad):
    """See ``Paced``."""

    def __init__(self, where: Where, plan: Paced) -> None:
        super().__init__(where, plan.streams, chat=plan.chat)
        self._plan = plan
        self._first_bytes: list[int] = []
        self._cut_probes = 0

    async def run(self) -> None:
        """Open all, let them settle, measure; then time first bytes beside them, and await all."""
        plan = self._plan
        busy_s = plan.streams * OPEN_STEP_S + 2 * _SETTLE_S + plan.seconds + _PROBING_S
        request = self._request(round(plan.rate * busy_s), rate=plan.rate)
        await self._open(plan.streams, request)
        # A fixed time: the schedule waits for no slow server, which could finish unmeasured.
        await asyncio.sleep(_SETTLE_S)
        self._begin = self._mark()
        await asyncio.sleep(plan.seconds)
        self._end = self._mark()
        probe = stream_request(self._where, 1, chat=plan.chat)
        self._first_bytes, self._cut_probes = await first_bytes(self._where.port, probe, _PROBING_S)
        await self._tally.gone.done

    def report(self) -> Report:
        """Return what was seen, the probes' first bytes among it."""
        for name, share in (("first_byte_p50_ms", 0.5), ("first_byte_p99_ms", 0.99)):
            self._figures[name] = quantile_ms(self._first_bytes, share)
        report = super().report()
        report.lost += self._cut_probes
        return report


class BurstLoad(_StreamLoad):
    """See ``Burst``."""

    def __init__(self, where: Where, plan: Burst) -> None:
        super().__init__(where, plan.streams)
        self._plan = plan

    async def run(self) -> None:
        """Open all at once and await all."""
        request = self._request(self._plan.events)
        self._begin = self._mark()
        await self._open(self._plan.streams, request, 0.0)
        await self._tally.gone.done
        self._end = self._mark()
        seconds = (self._end.at_ns - self._begin.at_ns) / 1e9
        self._figures["events_per_s"] = self._tally.events / seconds


class HeldLoad(_StreamLoad):
    """See ``Held``."""

    def __init__(self, where: Where, plan: Held) -> None:
        super().__init__(where, plan.many)
        self._plan = plan

    async def run(self) -> None:
        """Open a few, then many; look at memory each time; release all and await their ends."""
        few, many = self._plan.few, self._plan.many
        request = self._request(1, held=True)
        idle_mb = rss_mb(self._where.server_pids)
        await self._open(few, request)
        await asyncio.sleep(_SETTLE_S)
        few_mb = rss_mb(self._where.server_pids)
        await self._open(many - few, request)
        await self._tally.opened.done
        await asyncio.sleep(_SETTLE_S)
        many_mb = rss_mb(self._where.server_pids)
        self._begin = self._mark()
        await WholeStream.fetch(self._where.upstream_port, get(RELEASE))
        await self._tally.gone.done
        self._end = self._mark()
        self._figures = {
            "idle_mb": idle_mb,
            "open_mb": many_mb,
            "kb_per_stream": (many_mb - few_mb) * 1024 / (many - few),
            "all_ended_ms": (self._end.at_ns - self._begin.at_ns) / 1e6,
        }


class LargeEventLoad(_StreamLoad):
    """See ``LargeEvent``."""

    def __init__(self, where: Where, plan: LargeEvent) -> None:
        super().__init__(where, plan.streams)
        self._plan = plan
        self._large = WholeStream(
            stream_request(where, _LARGE_TOKENS, rate=plan.rate, logprobs_bytes=plan.large_bytes)
        )

    async def run(self) -> None:
        """Open the paced streams, then the one with the large event; await all."""
        plan = self._plan
        busy_s = plan.streams * OPEN_STEP_S + 2 * _SETTLE_S + plan.seconds
        request = self._request(round(plan.rate * busy_s), rate=plan.rate)
        await self._open(plan.streams, request)
        await self._tally.opened.done
        await asyncio.sleep(_SETTLE_S)
        self._begin = self._mark()
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self._large, "127.0.0.1", self._where.port)
        await self._large.done
        self._figures["large_event_ms"] = (
            self._large.took_ns / 1e6 - _LARGE_TOKENS / plan.rate * 1000
        )
        await asyncio.sleep(_SETTLE_S)
        self._end = self._mark()
        await self._tally.gone.done

    def report(self) -> Report:
        """Return what was seen; the large event's stream is one of those that end."""
        body = self._large.body
        report = super().report()
        report.lost += _LARGE_TOKENS + RESPONSE_EVENTS_AROUND - body.count(b"data: {")
        report.figures["large_event_mb"] = len(body) / 1e6
        name = self._large.last_event
        report.last_events[name] = report.last_events.get(name, 0) + 1
        return report
