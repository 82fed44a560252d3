"""What was done, counted once per stream: a relayed event costs no update of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge

from proxy.core.corrector import Mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.background.run import Run
    from proxy.core.corrector import Corrector

__all__ = ["Metrics"]


class Metrics:
    """The proxy's metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.corrections = Counter(
            "lastword_corrections",
            "Terminal events whose name was, or in mode observe would have been, corrected.",
            ["from", "to", "mode"],
            registry=self.registry,
        )
        self.contradictions = Counter(
            "lastword_contradictions",
            "Terminal events that say completed with a payload that does not.",
            registry=self.registry,
        )
        self.overlong_events = Counter(
            "lastword_overlong_events",
            "Events longer than max_event_bytes, passed uncorrected.",
            registry=self.registry,
        )
        self.dropped_events = Counter(
            "lastword_dropped_events",
            "Events that upstream sent after the terminal one.",
            registry=self.registry,
        )
        self.compressed_streams = Counter(
            "lastword_compressed_streams",
            "Event streams that came compressed although identity was asked for.",
            ["coding"],
            registry=self.registry,
        )
        self.upstream_errors = Counter(
            "lastword_upstream_errors",
            "Requests that upstream could not be asked or did not answer.",
            registry=self.registry,
        )

        self.dropped_copies = Counter(
            "lastword_dropped_copies",
            "Copies of background responses that could not be kept.",
            registry=self.registry,
        )

    def watch_store(self, is_up: Callable[[], bool]) -> None:
        """Tell whether the store of copies is there, asked when the metrics are read."""
        gauge = Gauge(
            "lastword_store_up",
            "Whether the store of background responses answered when it was last asked.",
            registry=self.registry,
        )
        gauge.set_function(lambda: float(is_up()))

    def count_dropped_copy(self, reason: str) -> None:  # noqa: ARG002 - the log has it
        """Count a copy that could not be kept."""
        self.dropped_copies.inc()

    def count_run(self, run: Run) -> None:
        """Count what one background response was found to be."""
        self.count_stream(run.corrector, Mode.ON)

    def count_stream(self, corrector: Corrector, mode: Mode) -> None:
        """Count what one stream was found to be."""
        terminal = corrector.terminal
        if terminal is not None and terminal.corrected:
            self.corrections.labels(terminal.says, terminal.name, mode.value).inc()
        if corrector.contradiction:
            self.contradictions.inc()
        if corrector.overlong_events:
            self.overlong_events.inc(corrector.overlong_events)
        if corrector.dropped_events:
            self.dropped_events.inc(corrector.dropped_events)
