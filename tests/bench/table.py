"""The figures of all rounds as a Markdown table: medians, spread, and ratios to yardsticks."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from tests.bench.plans import Paced
from tests.bench.servers import SERVERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.bench.measured import Measured
    from tests.bench.scenarios import Column, Scenario

Results = dict[str, list["Measured"]]
"""The rounds of each server, by its name."""

_SATURATED: Final = 0.85
_NOISY: Final = 0.05
_KEEPS_UP: Final = 0.97


def median(rounds: list[Measured], figure: str) -> float:
    """Return a figure's median over all rounds; NaN of none, or if one lacks it."""
    values = [measured.figure(figure) for measured in rounds]
    if not values or any(value != value for value in values):  # noqa: PLR0124 - NaN
        return float("nan")
    return statistics.median(values)


def table(scenario: Scenario, results: Results) -> str:
    """Return medians with (min-max), and some of them divided by the yardsticks' medians; Markdown.

    Notes follow where a figure is not the server's alone.
    """
    parts = [_figures(scenario, results)]
    yardsticks = [name for name in scenario.yardsticks if results.get(name)]
    if yardsticks:
        parts.append(_ratios(scenario, results, yardsticks))
    if notes := list(_notes(scenario, results)):
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def digest(runs: dict[Scenario, Results]) -> str:
    """Return the median of each scenario's first column, a row for each scenario; Markdown."""
    names = [
        name
        for name in SERVERS
        if name != "direct" and any(results.get(name) for results in runs.values())
    ]
    rows = [["", *(SERVERS[name].title for name in names)]]
    for scenario, results in runs.items():
        lead = scenario.columns[0]
        row = [f"{scenario.title}: {lead.title}"]
        for name in names:
            rounds = results.get(name)
            row.append(f"{median(rounds, lead.figure):.{lead.digits}f}" if rounds else "")
        rows.append(row)
    return _markdown(rows)


def _figures(scenario: Scenario, results: Results) -> str:
    head = ["", *(column.title for column in scenario.columns)]
    rows = [[*head, "corrected", "lost"] if scenario.corrects else [*head, "lost"]]
    for name, rounds in results.items():
        if not rounds:
            continue
        row = [SERVERS[name].title, *(_spread(column, rounds) for column in scenario.columns)]
        if scenario.corrects:
            corrected = sum(measured.corrected for measured in rounds)
            row.append(f"{corrected}/{sum(measured.streams for measured in rounds)}")
        rows.append([*row, str(sum(measured.report.lost for measured in rounds))])
    return _markdown(rows)


def _ratios(scenario: Scenario, results: Results, yardsticks: list[str]) -> str:
    columns = [column for column in scenario.columns if column.ratio]
    names = " / ".join(f"÷ {SERVERS[name].title}" for name in yardsticks)
    rows = [[f"medians {names}", *(column.title for column in columns)]]
    for name, rounds in results.items():
        if rounds and name != "direct":
            row = [SERVERS[name].title]
            for column in columns:
                ratios = (ratio(rounds, results[base], column.figure) for base in yardsticks)
                row.append(" / ".join(f"{value:.2f}" for value in ratios))
            rows.append(row)
    return _markdown(rows)


def _markdown(rows: list[list[str]]) -> str:
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows)


def _spread(column: Column, rounds: list[Measured]) -> str:
    values = [measured.figure(column.figure) for measured in rounds]
    shown = [f"{value:.{column.digits}f}" for value in (min(values), max(values))]
    return f"{median(rounds, column.figure):.{column.digits}f} ({'-'.join(shown)})"


def ratio(rounds: list[Measured], yardstick: list[Measured], figure: str) -> float:
    """Return one median divided by another; NaN where there is nothing to divide by."""
    base = median(yardstick, figure)
    return median(rounds, figure) / base if base else float("nan")


def _notes(scenario: Scenario, results: Results) -> Iterator[str]:
    """Say where the figures are not the server's alone."""
    plan = scenario.plan(1.0)
    for name, rounds in results.items():
        if not rounds:
            continue
        busy = statistics.median(measured.load_busy for measured in rounds)
        if busy > _SATURATED:
            yield (
                f"NOTE {name}: upstream and client used {busy:.0%} of their core: they are the"
                " limit, and delays are theirs too."
            )
        server = statistics.median(measured.others_on_server_core for measured in rounds)
        load = statistics.median(measured.others_on_load_core for measured in rounds)
        if name == "direct":
            server = 0.0  # it has none
        if isinstance(plan, Paced):
            kept = statistics.median(
                measured.report.work / (plan.streams * plan.rate * measured.report.costs.window_s)
                for measured in rounds
            )
            if kept < _KEEPS_UP:
                yield f"NOTE {name}: it does not keep up: {kept:.0%} of the events came in time."
        if max(server, load) > _NOISY:
            yield (
                f"NOTE {name}: others used {server:.0%} of the server's core and {load:.0%} of"
                " the load's: delays are not to be trusted."
            )
