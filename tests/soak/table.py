"""The summary of a soak, for people."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from tests.soak.plan import Fault

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.soak.driver import Report


def table(report: Report) -> str:
    """Write what was done and seen as a few tables."""
    tally = report.tally
    ways = sorted({way for _, way in tally.outcomes})
    rows = [
        [fault.value, *(str(tally.outcomes[fault.value, way] or "") for way in ways)]
        for fault in Fault
    ]
    sums = [str(sum(n for (_, w), n in tally.outcomes.items() if w == way)) for way in ways]
    amounts = (
        f"{tally.streams} streams judged, {tally.events} events, {tally.bytes / 2**20:.1f} MiB,"
        f" {tally.heartbeats} heartbeats; {report.upstream_requests} requests upstream"
    )
    starvation = report.starvation
    busy = (
        f"machine: {starvation.times} times without a processor, {starvation.longest_s:.1f} s at"
        f" most; {len(tally.set_aside)} streams set aside for it"
        + (": TOO BUSY TO TELL" if report.too_busy else "")
    )
    late_mb = median(report.late)
    memory = (
        f"RSS: {report.warm_mb:.1f} MB at the end of the warm-up; in the second half"
        f" {late_mb:.1f} MB median ({100 * (late_mb / report.warm_mb - 1):+.1f} %),"
        f" {min(report.late):.1f} MB least"
    )
    lines = [f"{n} x {level} {event}" for (level, event), n in report.log_lines.most_common()]
    parts = [
        "\n".join(_aligned([["upstream", *ways], *rows, ["all", *sums]])),
        amounts,
        busy,
        "\n".join(_aligned(_held(report))),
        memory,
        f"log: {'; '.join(lines)}",
        f"drain: {report.active}; exit status {report.exit_status}",
        "\n".join(["FLAWS:", *report.flaws]) if report.flaws else "no flaw",
    ]
    return "\n\n".join(parts)


def _held(report: Report) -> Iterable[Sequence[str]]:
    """What the proxy held: at the start, in the run, after the quiet pause."""
    yield ["held by the proxy", "start", "median", "most", "after"]
    for name, shown, form in (
        ("rss_mb", "RSS, MB", ".1f"),
        ("fds", "open files", ".0f"),
        ("threads", "threads", ".0f"),
        ("clients", "client connections", ".0f"),
        ("upstreams", "upstream connections", ".0f"),
    ):
        seen = [getattr(sample, name) for sample in report.samples]
        values = [
            getattr(report.before, name),
            median(seen),
            max(seen),
            getattr(report.after, name),
        ]
        yield [shown, *(format(value, form) for value in values)]


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
