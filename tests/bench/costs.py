"""What a stretch of time cost, read from /proc at its begin and at its end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.bench.plans import Costs
from tests.bench.processes import core_busy_s, cpu_s

if TYPE_CHECKING:
    from tests.bench.plans import Where


@dataclass(frozen=True)
class Mark:
    """One moment: how much work was done, and what had been spent."""

    at_ns: int
    work: int
    server_cpu_s: float
    upstream_cpu_s: float
    client_cpu_s: float
    server_core_busy_s: float
    load_core_busy_s: float

    @classmethod
    def now(cls, where: Where, work: int) -> Mark:
        """Read the clocks."""
        return cls(
            time.monotonic_ns(),
            work,
            cpu_s(where.server_pids),
            cpu_s([where.upstream_pid]),
            time.process_time(),
            core_busy_s(where.server_core),
            core_busy_s(where.load_core),
        )

    def costs_until(self, end: Mark) -> Costs:
        """Return what was spent between two marks."""
        return Costs(
            window_s=(end.at_ns - self.at_ns) / 1e9,
            server_cpu_s=end.server_cpu_s - self.server_cpu_s,
            upstream_cpu_s=end.upstream_cpu_s - self.upstream_cpu_s,
            client_cpu_s=end.client_cpu_s - self.client_cpu_s,
            server_core_busy_s=end.server_core_busy_s - self.server_core_busy_s,
            load_core_busy_s=end.load_core_busy_s - self.load_core_busy_s,
        )


def quantile_ms(times_ns: list[int], share: float) -> float:
    """Return a quantile of these times, in milliseconds; NaN of none."""
    if not times_ns:
        return float("nan")
    ordered = sorted(times_ns)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1e6
