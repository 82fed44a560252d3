"""Tell operators what became of requests, streams and copies: counted, and logged."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from proxy.core.background import error_message
from proxy.core.corrector import Mode
from proxy.core.outcome import Outcome
from proxy.gateway.record import brief

if TYPE_CHECKING:
    from proxy.background.run import Run
    from proxy.core.corrector import Corrector
    from proxy.gateway.record import Record
    from proxy.operations.metrics import Metrics

__all__ = ["Reporter"]

log = structlog.stdlib.get_logger("lastword")


class Reporter:
    """Takes note of what ends; with ``log_requests`` a line is logged for every request."""

    def __init__(self, metrics: Metrics, *, log_requests: bool) -> None:
        self._metrics = metrics
        self._log_requests = log_requests

    # From the gateway.

    def stream_ended(
        self,
        corrector: Corrector,
        mode: Mode,
        outcome: Outcome,
        *,
        seconds: float | None,
        first_event_s: float | None,
    ) -> None:
        """Count a stream, and tell of a terminal event that contradicts itself."""
        self._metrics.count_stream(
            corrector, mode, outcome, seconds=seconds, first_event_s=first_event_s
        )
        terminal = corrector.terminal
        if terminal is None:
            return
        if corrector.contradiction:
            log.warning(
                "the terminal event says completed and its payload does not",
                response_id=brief(corrector.response_id),
                status=brief(terminal.status),
            )
        if terminal.corrected and mode is Mode.OBSERVE:
            log.info(
                "the terminal event would be corrected",
                response_id=brief(corrector.response_id),
                says=terminal.says,
                would_say=terminal.name,
            )

    def stream_compressed(self, *, decoded: bool) -> None:
        """Count a compressed stream."""
        self._metrics.compressed_streams.labels("decoded" if decoded else "passed").inc()

    def replayed(self, source: str) -> None:
        """Count a replay."""
        self._metrics.replays.labels(source).inc()

    def upstream_failed(self, kind: str) -> None:
        """Count a request that upstream could not be asked or did not answer."""
        self._metrics.upstream_errors.labels(kind).inc()

    def limit_reached(self, limit: str) -> None:
        """Count a request that was turned away."""
        self._metrics.limit_reached.labels(limit).inc()

    def request_ended(self, record: Record, seconds: float) -> None:
        """Log the request."""
        if not self._log_requests:
            return
        told: dict[str, object] = {
            "method": record.method,
            "route": record.route,
            "status": record.status,
            "outcome": record.outcome,
            "duration_s": round(seconds, 6),
            "bytes": record.bytes,
            "response_id": record.response_id,
            "model": record.model,
            "mode": record.mode,
            "corrected": record.corrected,
            "events": record.events,
            "request_id": record.request_id,
            "trace_id": record.trace_id,
        }
        if record.first_event_at is not None:
            told["time_to_first_event_s"] = round(record.first_event_at - record.began_at, 6)
        log.info("request", **{name: value for name, value in told.items() if value is not None})

    # From the runs.

    def count_run(self, run: Run) -> None:
        """Count a run as a stream, and its copy if that is whole; one that goes on is neither."""
        if run.outcome is None:
            return
        began_at, first_at = run.began_at, run.first_event_at
        now = asyncio.get_running_loop().time()
        self.stream_ended(
            run.corrector,
            Mode.ON,
            run.outcome,
            seconds=None if first_at is None else now - began_at,
            first_event_s=None if first_at is None else first_at - began_at,
        )
        if run.outcome is Outcome.LOST:
            log.warning(
                "upstream was lost within a background response",
                error=error_message(run.snapshot or b"{}"),
                response_id=run.key.response_id if run.key else None,
            )
        if run.holds_copy and not run.copy_lost:
            self._metrics.copies.inc()

    def count_dropped_copy(self, reason: str) -> None:
        """Count a copy that could not be kept."""
        self._metrics.dropped_copies.labels(reason).inc()
