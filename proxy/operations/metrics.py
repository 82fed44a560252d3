"""What was done, counted once per stream: a relayed event costs no update of its own."""

from __future__ import annotations

import platform
from itertools import product
from typing import TYPE_CHECKING, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)

import proxy
from proxy.core.corrector import Mode
from proxy.core.outcome import Outcome
from proxy.core.responses import COMPLETED, FAILED, INCOMPLETE
from proxy.errors import UpstreamTrouble

if TYPE_CHECKING:
    from proxy.core.corrector import Corrector

__all__ = ["Metrics"]

# Fine where vLLM answers at once, coarse where a prompt waits in its queue.
_FIRST_EVENT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_STREAM_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
# What a request is refused with before anything acts on it; 500 is a fault of ours.
_REFUSALS = (400, 408, 414, 417, 429, 431, 500, 505)
_APPEND_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """The proxy's metrics in a registry of their own.

    No label takes a value that a client may choose.  Every series is there from the start: a rate
    over one that appears with its first count would miss that.
    """

    def __init__(self) -> None:
        # A second series for each counter, and nobody asks for it.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # as it comes
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        build = Info("lastword_build", "What runs here.", registry=registry)
        build.info({"version": proxy.__version__, "python": platform.python_version()})
        self.ready = Gauge("lastword_ready", "Whether /readyz says so: 1 or 0.", registry=registry)
        self._define_streams(registry)
        self._define_copies(registry)
        self._define_upstream(registry)
        self._define_limits(registry)

    def _define_streams(self, registry: CollectorRegistry) -> None:
        self.streams = Counter(
            "lastword_streams",
            "Event streams that have ended, by how: relayed ones and background runs.",
            ["outcome"],
            registry=registry,
        )
        for outcome in Outcome:
            self.streams.labels(outcome)
        self.events = Counter(
            "lastword_events",
            "Events of the streams that have ended.",
            registry=registry,
        )
        self.corrections = Counter(
            "lastword_corrections",
            "Terminal events whose name was, or in mode observe would have been, corrected.",
            ["from", "to", "mode"],
            registry=registry,
        )
        for name, mode in product((INCOMPLETE, FAILED), (Mode.ON, Mode.OBSERVE)):
            self.corrections.labels(COMPLETED, name, mode.value)
        self.contradictions = Counter(
            "lastword_contradictions",
            "Terminal events that say completed with a payload that does not.",
            registry=registry,
        )
        self.overlong_events = Counter(
            "lastword_overlong_events",
            "Events longer than max_event_bytes or max_buffered_bytes allow, passed uncorrected.",
            registry=registry,
        )
        self.dropped_events = Counter(
            "lastword_dropped_events",
            "Events that upstream sent after the terminal one.",
            registry=registry,
        )
        self.compressed_streams = Counter(
            "lastword_compressed_streams",
            "Event streams that came compressed although identity was asked for.",
            ["coding"],
            registry=registry,
        )
        for coding in ("decoded", "passed"):
            self.compressed_streams.labels(coding)
        self.first_event = Histogram(
            "lastword_time_to_first_event_seconds",
            "From a request's arrival to the first event of its stream.",
            buckets=_FIRST_EVENT_S,
            registry=registry,
        )
        self.duration = Histogram(
            "lastword_stream_duration_seconds",
            "From a request's arrival to the end of its stream.",
            buckets=_STREAM_S,
            registry=registry,
        )
        self.active_streams = Gauge(
            "lastword_active_streams",
            "Event streams and WebSockets that are being relayed.",
            registry=registry,
        )

    def _define_copies(self, registry: CollectorRegistry) -> None:
        self.active_runs = Gauge(
            "lastword_active_runs", "Background responses that are being made.", registry=registry
        )
        self.active_followers = Gauge(
            "lastword_active_followers",
            "Clients that are being sent a copy's events.",
            registry=registry,
        )
        self.replays = Counter(
            "lastword_replays",
            "Replays that were begun: from a running copy, a stored one, or by upstream.",
            ["source"],
            registry=registry,
        )
        for source in ("copy_live", "copy_stored", "upstream"):
            self.replays.labels(source)
        self.copies = Counter(
            "lastword_copies",
            "Copies of background responses that were kept whole.",
            registry=registry,
        )
        self.dropped_copies = Counter(
            "lastword_dropped_copies",
            "Copies of background responses that could not be kept.",
            ["reason"],
            registry=registry,
        )
        for reason in ("full", "unavailable", "stream", "lost"):
            self.dropped_copies.labels(reason)
        self.store_up = Gauge(
            "lastword_store_up", "Whether the store answers: 1 or 0.", registry=registry
        )
        self.store_bytes = Gauge(
            "lastword_store_bytes", "Bytes of all copies together.", registry=registry
        )
        self.store_max_bytes = Gauge(
            "lastword_store_max_bytes",
            "Bytes that all copies may have together.",
            registry=registry,
        )
        self.append_duration = Histogram(
            "lastword_store_append_duration_seconds",
            "How long the store took to keep a batch of events.",
            buckets=_APPEND_S,
            registry=registry,
        )

    def _define_upstream(self, registry: CollectorRegistry) -> None:
        self.upstream_up = Gauge(
            "lastword_upstream_up",
            "Whether upstream answers GET /health, if it is asked: 1 or 0.",
            registry=registry,
        )
        self.upstream_errors = Counter(
            "lastword_upstream_errors",
            "Requests that upstream could not be asked or did not answer, and lost WebSockets.",
            ["kind"],
            registry=registry,
        )
        for kind in get_args(UpstreamTrouble):
            self.upstream_errors.labels(kind)

    def _define_limits(self, registry: CollectorRegistry) -> None:
        self.limit_reached = Counter(
            "lastword_limit_reached",
            "Requests answered with 503 because a limit of the proxy was reached.",
            ["limit"],
            registry=registry,
        )
        for limit in ("max_buffered_bytes", "max_streams"):
            self.limit_reached.labels(limit)
        self.buffered_bytes = Gauge(
            "lastword_buffered_bytes", "Bytes that count for max_buffered_bytes.", registry=registry
        )
        self.stream_slots = Gauge(
            "lastword_stream_slots", "What counts for max_streams.", registry=registry
        )
        self.refused_requests = Counter(
            "lastword_refused_requests",
            "Requests refused before anything acted on them: no HTTP, too large, too slow.",
            ["status"],
            registry=registry,
        )
        for status in _REFUSALS:
            self.refused_requests.labels(status)

    def count_refused(self, status: int) -> None:
        """Count a request that was refused for its form."""
        self.refused_requests.labels(status=status).inc()

    def count_stream(
        self,
        corrector: Corrector,
        mode: Mode,
        outcome: Outcome,
        *,
        seconds: float | None,
        first_event_s: float | None,
    ) -> None:
        """Count what one stream was found to be."""
        self.streams.labels(outcome).inc()
        self.events.inc(corrector.events)
        if seconds is not None:
            self.duration.observe(seconds)
        if first_event_s is not None:
            self.first_event.observe(first_event_s)
        terminal = corrector.terminal
        if terminal is not None and terminal.corrected:
            self.corrections.labels(terminal.says, terminal.name, mode.value).inc()
        if corrector.contradiction:
            self.contradictions.inc()
        if corrector.overlong_events:
            self.overlong_events.inc(corrector.overlong_events)
        if corrector.dropped_events:
            self.dropped_events.inc(corrector.dropped_events)
