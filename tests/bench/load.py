"""The client's process: `python -m tests.bench.load ORDER`.

It takes an ``Order`` as JSON and prints a ``Report``.  It reads the server's CPU time together with
its own count of events, so that one belongs to the other.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from typing import Protocol

import msgspec
import uvloop

from tests.bench.plans import (
    Burst,
    Held,
    LargeEvent,
    Order,
    Paced,
    Replay,
    Report,
    Requests,
)
from tests.bench.replay_load import ReplayLoad
from tests.bench.request_load import RequestLoad
from tests.bench.stream_loads import BurstLoad, HeldLoad, LargeEventLoad, PacedLoad


class Load(Protocol):
    """One load, from its first request to its report."""

    async def run(self) -> None:
        """Do it; may be cancelled."""

    def report(self) -> Report:
        """Tell what was seen, also after a cancelled run."""


def load(order: Order) -> Load:
    """Return the load that a plan asks for."""
    where = order.where
    match order.plan:
        case Paced() as plan:
            return PacedLoad(where, plan)
        case Burst() as plan:
            return BurstLoad(where, plan)
        case Held() as plan:
            return HeldLoad(where, plan)
        case LargeEvent() as plan:
            return LargeEventLoad(where, plan)
        case Requests() as plan:
            return RequestLoad(where, plan)
        case Replay() as plan:
            return ReplayLoad(where, plan)


async def _measure(order: Order) -> Report:
    ordered = load(order)
    try:
        async with asyncio.timeout(order.where.limit_s):
            await ordered.run()
    except TimeoutError:
        sys.stderr.write("the time limit was reached: what had not come counts as lost\n")
    return ordered.report()


def main() -> None:
    """Do what the first argument says."""
    if os.sched_getscheduler(0) == os.SCHED_RR:
        # Before the upstream on their core: an event is seen when it comes, not after a batch.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
    gc.disable()  # a collection would look like a stall of the server under test
    order = msgspec.json.decode(sys.argv[1], type=Order)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(_measure(order))))


if __name__ == "__main__":
    main()
