"""What Lastword must reach, each target judged by the medians of the same run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.bench.table import Results, median, ratio

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.bench.scenarios import Scenario


@dataclass(frozen=True)
class Target:
    """One limit on a figure of one scenario."""

    text: str
    scenario: str
    value: Callable[[Results], float]
    """NaN where the run does not tell."""
    limit: float
    least: bool = False
    """The value must reach the limit, not stay below."""

    def met(self, value: float) -> bool:
        """Tell whether a value is good enough."""
        return value >= self.limit if self.least else value <= self.limit


def _median(figure: str, results: Results, *, server: str = "lastword") -> float:
    return median(results.get(server, []), figure)


def _ratio(figure: str, yardstick: str, results: Results, *, server: str = "lastword") -> float:
    return ratio(results.get(server, []), results.get(yardstick, []), figure)


def _first_byte_over_direct(results: Results) -> float:
    direct, ours = (
        _median("first_byte_p50_ms", results, server=name) for name in ("direct", "lastword")
    )
    return ours - direct


def _lost(results: Results) -> float:
    rounds = results.get("lastword")
    return sum(measured.report.lost for measured in rounds) if rounds else float("nan")


TARGETS: Final = (
    Target("CPU per event ÷ Envoy + Lua", "paced", partial(_ratio, "cpu_us", "envoy-lua"), 1.0),
    Target("CPU per event ÷ nginx", "paced", partial(_ratio, "cpu_us", "nginx"), 1.3),
    Target("delay p50 ÷ Envoy + Lua", "paced", partial(_ratio, "delay_p50_ms", "envoy-lua"), 1.0),
    Target("delay p99 ÷ Envoy + Lua", "paced", partial(_ratio, "delay_p99_ms", "envoy-lua"), 1.5),
    Target("first byte p50 over direct, ms", "paced", _first_byte_over_direct, 1.0),
    Target("peak memory at 200 streams, MB", "paced", partial(_median, "peak_rss_mb"), 90),
    Target("events lost of 2,000 streams at once", "silent", _lost, 0),
    Target("memory of each further stream, KB", "silent", partial(_median, "kb_per_stream"), 40),
    Target("longest stall beside a 16 MB event, ms", "large", partial(_median, "delay_max_ms"), 50),
    Target(
        "CPU recording in memory ÷ relaying",
        "recording",
        partial(_ratio, "cpu_us", "lastword", server="recording"),
        1.5,
    ),
    Target(
        "CPU recording on SQLite ÷ relaying",
        "recording",
        partial(_ratio, "cpu_us", "lastword", server="recording-sqlite"),
        1.5,
    ),
    Target(
        "replay of 10,000 events in memory, ms",
        "replay",
        partial(_median, "replay_ms", server="recording"),
        100,
    ),
    Target(
        "replay of 10,000 events on SQLite, ms",
        "replay",
        partial(_median, "replay_ms", server="recording-sqlite"),
        100,
    ),
    Target(
        "small requests/s ÷ uvicorn's constant",
        "requests",
        partial(_ratio, "per_s", "constant"),
        0.6,
        least=True,
    ),
)


def targets_table(runs: dict[Scenario, Results]) -> str:
    """Return one line for each target that these scenarios' results tell of; Markdown."""
    by_name = {scenario.name: results for scenario, results in runs.items()}
    lines = ["| target | limit | measured | |", "| --- | --- | --- | --- |"]
    for target in TARGETS:
        value = target.value(by_name.get(target.scenario, {}))
        if value == value:  # noqa: PLR0124 - not NaN
            sign = "≥" if target.least else "≤"
            verdict = "met" if target.met(value) else "**missed**"
            lines.append(f"| {target.text} | {sign} {target.limit:g} | {value:.3g} | {verdict} |")
    return "\n".join(lines) if len(lines) > 2 else ""
