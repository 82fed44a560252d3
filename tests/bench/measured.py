"""One server in one round: what the load reported, and figures made of it."""

from __future__ import annotations

import msgspec

from tests.bench.plans import Report  # noqa: TC001 - msgspec reads it at run time

CORRECTED = "response.incomplete"


class Measured(msgspec.Struct):
    """One server in one round."""

    report: Report
    peak_rss_mb: float
    load_average: float

    def figure(self, name: str) -> float:
        """Return a figure by its name; NaN where the round did not come so far."""
        if name == "peak_rss_mb":
            return self.peak_rss_mb
        if name == "cpu_us":
            return self.cpu_us
        return self.report.figures.get(name, float("nan"))

    @property
    def cpu_us(self) -> float:
        """The server's CPU time per event or answer, in microseconds; NaN if none came."""
        work = self.report.work
        return self.report.costs.server_cpu_s / work * 1e6 if work else float("nan")

    @property
    def streams(self) -> int:
        """How many streams have ended, in whatever way."""
        return sum(self.report.last_events.values())

    @property
    def corrected(self) -> int:
        """How many of them ended in the corrected event."""
        return self.report.last_events.get(CORRECTED, 0)

    @property
    def load_busy(self) -> float:
        """The share of its core that upstream and client used."""
        costs = self.report.costs
        return _share(costs.upstream_cpu_s + costs.client_cpu_s, costs.window_s)

    @property
    def others_on_server_core(self) -> float:
        """The share of the server's core that was used by someone else: noise."""
        costs = self.report.costs
        return max(0.0, _share(costs.server_core_busy_s - costs.server_cpu_s, costs.window_s))

    @property
    def others_on_load_core(self) -> float:
        """The share of the load's core that was used by someone else: noise."""
        costs = self.report.costs
        return max(0.0, _share(costs.load_core_busy_s, costs.window_s) - self.load_busy)

    def line(self) -> str:
        """Return the round in one line."""
        report = self.report
        figures = ", ".join(f"{name} {value:.4g}" for name, value in report.figures.items())
        return (
            f"cpu_us {self.cpu_us:.1f}, {figures}, peak {self.peak_rss_mb:.0f} MB,"
            f" work {report.work}, lost {report.lost}, ended {report.last_events},"
            f" load core {self.load_busy:.0%}, others {self.others_on_server_core:.0%}"
            f" and {self.others_on_load_core:.0%}"
        )


def _share(part_s: float, whole_s: float) -> float:
    return part_s / whole_s if whole_s else 0.0
