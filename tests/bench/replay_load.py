"""A load that reads one recorded response again and again, whole."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from tests.bench.clients import WholeStream, get
from tests.bench.costs import Mark
from tests.bench.plans import Report
from tests.bench.stream_loads import stream_request
from tests.bench.vllm_events import RESPONSE_EVENTS_AROUND

if TYPE_CHECKING:
    from tests.bench.plans import Replay, Where


class _Created(msgspec.Struct):
    """The first event of a Responses stream."""

    class Response(msgspec.Struct):
        """The response object in it."""

        id: str

    response: Response


class ReplayLoad:
    """See ``Replay``."""

    def __init__(self, where: Where, plan: Replay) -> None:
        self._where = where
        self._plan = plan
        self._begin = self._end = Mark.now(where, 0)
        self._lost = plan.events * (1 + plan.reads)
        self._took_ms: list[float] = []
        self._last_events: Counter[str] = Counter()

    async def run(self) -> None:
        """Have the response recorded, then read it; every read must be its bytes."""
        port, plan = self._where.port, self._plan
        request = stream_request(self._where, plan.events - RESPONSE_EVENTS_AROUND)
        created = await WholeStream.fetch(port, request)
        self._count(created)
        data = created.body.split(b"\n", 2)[1].removeprefix(b"data: ")
        response = msgspec.json.decode(data, type=_Created).response
        read = get(f"/v1/responses/{response.id}?stream=true".encode())
        self._begin = Mark.now(self._where, 0)
        for number in range(plan.reads):
            replay = await WholeStream.fetch(port, read)
            self._end = Mark.now(self._where, (number + 1) * plan.events)
            self._took_ms.append(replay.took_ns / 1e6)
            if replay.body == created.body:
                self._count(replay)

    def _count(self, stream: WholeStream) -> None:
        self._lost -= stream.body.count(b"data: {")
        self._last_events[stream.last_event] += 1

    def report(self) -> Report:
        """Return what was seen; all events of a read that differs are lost."""
        return Report(
            costs=self._begin.costs_until(self._end),
            work=self._end.work - self._begin.work,
            figures={
                "replay_ms": statistics.median(self._took_ms) if self._took_ms else float("nan")
            },
            lost=self._lost,
            last_events=dict(self._last_events),
        )
