"""What all clients of a soak together have seen."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.soak.plan import HEARTBEAT

if TYPE_CHECKING:
    from tests.soak.plan import Plan


class Tally:
    """Counts what came, stream by stream, and keeps what was wrong."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.streams = 0
        self.events = 0
        self.bytes = 0
        self.heartbeats = 0
        self.flaws: list[str] = []
        self.set_aside: list[str] = []
        """What went wrong with streams while the machine was too busy to judge them."""

    def count(self, plan: Plan, outcome: str) -> None:
        """Count one stream that was judged to be right."""
        self.streams += 1
        self.outcomes[plan.fault.value, outcome] += 1

    def read(self, data: bytes) -> bytes:
        """Count what came and return it without heartbeats."""
        beats = data.count(HEARTBEAT)
        self.heartbeats += beats
        self.events += data.count(b"\n\n") - beats
        self.bytes += len(data)
        return data.replace(HEARTBEAT, b"") if beats else data
