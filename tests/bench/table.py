"""The figures of one round in a line, and those of all rounds in a table."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

import msgspec

from tests.bench.load import Report  # noqa: TC001 - msgspec reads it at run time

if TYPE_CHECKING:
    from collections.abc import Callable

_YARDSTICK: Final = "nginx"
_SATURATED: Final = 0.85


class Measured(msgspec.Struct):
    """One server in one round."""

    report: Report
    peak_rss_mb: float
    load_average: float

    @property
    def cpu_us(self) -> float:
        """The server's CPU time per event, in microseconds."""
        return self.report.server_cpu_s / max(1, self.report.events) * 1e6

    @property
    def load_busy(self) -> float:
        """The share of its core that upstream and client used."""
        report = self.report
        return (report.upstream_cpu_s + report.client_cpu_s) / report.window_s

    @property
    def others_on_server_core(self) -> float:
        """The share of the server's core that was used by someone else: noise."""
        report = self.report
        return max(0.0, report.server_core_busy_s - report.server_cpu_s) / report.window_s

    @property
    def others_on_load_core(self) -> float:
        """The share of the load's core that was used by someone else: noise."""
        return max(0.0, self.report.load_core_busy_s / self.report.window_s - self.load_busy)

    def line(self) -> str:
        """Return the round in one line."""
        report = self.report
        return (
            f"{self.cpu_us:.1f} us/event, p50 {report.delay_p50_ms:.3f} ms,"
            f" p99 {report.delay_p99_ms:.2f} ms, first byte {report.first_byte_p50_ms:.2f} ms,"
            f" {self.peak_rss_mb:.0f} MB, {report.events} events, {report.lost} lost,"
            f" load core {self.load_busy:.0%}, others {self.others_on_server_core:.0%}"
            f" and {self.others_on_load_core:.0%}, ended {report.last_events}"
        )


_COLUMNS: Final[tuple[tuple[str, Callable[[Measured], float], int], ...]] = (
    ("CPU us/event", lambda measured: measured.cpu_us, 1),
    ("delay p50 ms", lambda measured: measured.report.delay_p50_ms, 3),
    ("delay p99 ms", lambda measured: measured.report.delay_p99_ms, 2),
    ("1st byte p50 ms", lambda measured: measured.report.first_byte_p50_ms, 2),
    ("peak RSS MB", lambda measured: measured.peak_rss_mb, 0),
)
_RATIO_COLUMNS: Final = 3


def table(results: dict[str, list[Measured]]) -> str:
    """Return medians with (min-max), the first columns also as ratios to nginx; Markdown."""
    head = ["server"]
    for index, (title, _, _) in enumerate(_COLUMNS):
        head += [title, f"/ {_YARDSTICK}"] if index < _RATIO_COLUMNS else [title]
    head += ["lost", "corrected", "load core", "others on the cores"]
    rows = [head, ["---"] * len(head)]
    rows += [_row(name, results) for name in results if results[name]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    busiest = max((each.load_busy for rounds in results.values() for each in rounds), default=0.0)
    if busiest > _SATURATED:
        lines.append(
            f"WARNING: upstream and client used {busiest:.0%} of their core: the delays are theirs"
            " too (in a burst they always are)."
        )
    return "\n".join(lines)


def _row(name: str, results: dict[str, list[Measured]]) -> list[str]:
    rounds = results[name]
    yardstick = results.get(_YARDSTICK, [])
    row = [name]
    for index, (_, figure, digits) in enumerate(_COLUMNS):
        values = [figure(measured) for measured in rounds]
        middle = statistics.median(values)
        row.append(f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})")
        if index < _RATIO_COLUMNS:
            base = statistics.median(map(figure, yardstick)) if yardstick else 0.0
            row.append(f"{middle / base:.2f}" if base else "-")
    row.append(str(sum(measured.report.lost for measured in rounds)))
    corrected = sum(measured.report.corrected for measured in rounds)
    streams = sum(sum(measured.report.last_events.values()) for measured in rounds)
    row.append(f"{corrected}/{streams}")
    row.append(f"{statistics.median(measured.load_busy for measured in rounds):.0%}")
    server = statistics.median(measured.others_on_server_core for measured in rounds)
    load = statistics.median(measured.others_on_load_core for measured in rounds)
    row.append(f"{server:.0%}, {load:.0%}")
    return row
