"""What is measured: one entry per scenario, with its servers and the columns of its table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.bench.plans import Burst, Held, LargeEvent, Paced, Plan, Replay, Requests

if TYPE_CHECKING:
    from collections.abc import Callable

_PASSING: Final = ("direct", "nginx", "envoy", "lastword")
_CORRECTING: Final = ("direct", "nginx", "envoy-lua", "lastword")
_RECORDING: Final = ("recording", "recording-sqlite")


@dataclass(frozen=True)
class Column:
    """A figure in the table; ``ratio`` puts it beside the scenario's yardsticks."""

    title: str
    figure: str
    digits: int
    ratio: bool = False


@dataclass(frozen=True)
class Scenario:
    """One load and who is put under it."""

    name: str
    title: str
    plan: Callable[[float], Plan]
    """Takes how many seconds are to be measured, where that is ours to say."""
    servers: tuple[str, ...]
    columns: tuple[Column, ...]
    """The first is the one that stands for the scenario."""
    yardsticks: tuple[str, ...] = ("nginx", "envoy-lua")
    corrects: bool = True
    """Its streams need correcting."""


_CPU: Final = Column("CPU µs/event", "cpu_us", 1, ratio=True)
_PEAK: Final = Column("peak MB", "peak_rss_mb", 0)
_PACED: Final = (
    _CPU,
    Column("delay p50 ms", "delay_p50_ms", 3, ratio=True),
    Column("delay p99 ms", "delay_p99_ms", 2, ratio=True),
    Column("first byte p50 ms", "first_byte_p50_ms", 2),
    _PEAK,
)

SCENARIOS: Final = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "paced",
            "200 streams x 50 events/s",
            lambda seconds: Paced(streams=200, rate=50, seconds=seconds),
            ("direct", "nginx", "envoy", "envoy-lua", "agentic-api", "obvious", "lastword"),
            _PACED,
        ),
        Scenario(
            "many",
            "1,000 streams x 10 events/s",
            lambda seconds: Paced(streams=1000, rate=10, seconds=seconds),
            _CORRECTING,
            _PACED,
        ),
        Scenario(
            "burst",
            "50 streams of 1,000 events as fast as they come",
            lambda _: Burst(streams=50, events=1000),
            ("direct", "nginx", "envoy-lua", "obvious", "lastword"),
            (_CPU, Column("events/s", "events_per_s", 0), _PEAK),
        ),
        Scenario(
            "silent",
            "2,000 silent streams, then all end at once",
            lambda _: Held(few=200, many=2000),
            _CORRECTING,
            (
                Column("KB per stream", "kb_per_stream", 1, ratio=True),
                Column("MB idle", "idle_mb", 0),
                Column("MB at 2,000", "open_mb", 0),
                Column("all ended ms", "all_ended_ms", 0, ratio=True),
            ),
        ),
        Scenario(
            "large",
            "a last event of 16 MB beside 50 streams x 50 events/s",
            lambda _: LargeEvent(streams=50, rate=50, seconds=2, large_bytes=16 << 20),
            ("direct", "nginx", "envoy-lua", "obvious", "lastword"),
            (
                Column("longest stall ms", "delay_max_ms", 1, ratio=True),
                Column("the large one took ms", "large_event_ms", 0),
                _PEAK,
            ),
        ),
        Scenario(
            "recording",
            "200 recorded streams x 50 events/s",
            lambda seconds: Paced(streams=200, rate=50, seconds=seconds),
            ("direct", "lastword", *_RECORDING),
            _PACED,
            yardsticks=("lastword",),
        ),
        Scenario(
            "replay",
            "a recorded response of 10,000 events read again",
            lambda _: Replay(events=10_000, reads=5),
            _RECORDING,
            (Column("replay ms", "replay_ms", 1), _CPU, _PEAK),
            yardsticks=(),
        ),
        Scenario(
            "chat",
            "200 chat streams x 50 events/s, not looked at",
            lambda seconds: Paced(streams=200, rate=50, seconds=seconds, chat=True),
            _PASSING,
            _PACED,
            yardsticks=("nginx", "envoy"),
            corrects=False,
        ),
        Scenario(
            "requests",
            "small requests, no streams, 32 connections",
            lambda seconds: Requests(connections=32, seconds=seconds),
            ("direct", "nginx", "envoy", "obvious", "constant", "lastword"),
            (
                Column("requests/s", "per_s", 0, ratio=True),
                Column("CPU µs/request", "cpu_us", 1, ratio=True),
                Column("answer p50 ms", "answer_p50_ms", 2),
                Column("answer p99 ms", "answer_p99_ms", 2),
                _PEAK,
            ),
            yardsticks=("nginx", "envoy", "constant"),
            corrects=False,
        ),
    )
}

QUICK: Final = Scenario(
    "quick",
    "100 streams x 50 events/s",
    lambda seconds: Paced(streams=100, rate=50, seconds=seconds),
    ("direct", "nginx", "obvious", "lastword"),
    _PACED,
    yardsticks=("nginx", "obvious"),
)
