"""The figures of all rounds for a file: medians, spread, ratios to yardsticks, and each round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tests.bench.machine import Facts  # noqa: TC001 - msgspec reads it at run time
from tests.bench.measured import Measured  # noqa: TC001 - the same
from tests.bench.table import Results, median, ratio

if TYPE_CHECKING:
    from tests.bench.scenarios import Scenario


class Figure(msgspec.Struct):
    """One figure of one server over all rounds."""

    median: float
    min: float
    max: float
    ratios: dict[str, float]
    """Its median divided by each yardstick's."""


class ServerSummary(msgspec.Struct):
    """One server in one scenario."""

    figures: dict[str, Figure]
    rounds: list[Measured]


class ScenarioSummary(msgspec.Struct):
    """One scenario."""

    title: str
    servers: dict[str, ServerSummary]


class Summary(msgspec.Struct):
    """A whole run."""

    machine: Facts
    scenarios: dict[str, ScenarioSummary] = {}


def summarise(scenario: Scenario, results: Results) -> ScenarioSummary:
    """Return what one scenario's results say."""
    return ScenarioSummary(
        scenario.title,
        {
            name: ServerSummary(
                {
                    figure: _figure(figure, rounds, scenario, results)
                    for figure in ("cpu_us", "peak_rss_mb", *rounds[0].report.figures)
                },
                rounds,
            )
            for name, rounds in results.items()
            if rounds
        },
    )


def _figure(name: str, rounds: list[Measured], scenario: Scenario, results: Results) -> Figure:
    values = [measured.figure(name) for measured in rounds]
    return Figure(
        median(rounds, name),
        min(values),
        max(values),
        {
            yardstick: ratio(rounds, results[yardstick], name)
            for yardstick in scenario.yardsticks
            if results.get(yardstick)
        },
    )
