"""A load of small requests that are no streams, on connections that stay open."""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import TYPE_CHECKING, Final, cast

import httptools

from tests.bench.clients import post
from tests.bench.costs import Mark, quantile_ms
from tests.bench.plans import Report

if TYPE_CHECKING:
    from tests.bench.plans import Requests, Where

_SETTLE_S: Final = 0.5
_REQUEST: Final = post(
    b"/v1/chat/completions",
    b'{"model":"bench","messages":[{"role":"user","content":"What is a whale?"}],"max_tokens":16}',
)


class RequestLoad:
    """See ``Requests``."""

    def __init__(self, where: Where, plan: Requests) -> None:
        self._where = where
        self._plan = plan
        self._answers = _Answers()
        self._begin = self._end = Mark.now(where, 0)

    async def run(self) -> None:
        """Keep every connection busy, measure, and close them."""
        loop = asyncio.get_running_loop()
        clients = []
        for _ in range(self._plan.connections):
            _, client = await loop.create_connection(
                lambda: _Client(self._answers), "127.0.0.1", self._where.port
            )
            clients.append(client)
        await asyncio.sleep(_SETTLE_S)
        self._begin = Mark.now(self._where, self._answers.good)
        self._answers.took_ns = array("q")
        await asyncio.sleep(self._plan.seconds)
        self._end = Mark.now(self._where, self._answers.good)
        for client in clients:
            client.stop()

    def report(self) -> Report:
        """Return what was seen; an answer that is not 200 and a cut connection are lost."""
        costs = self._begin.costs_until(self._end)
        answers = self._end.work - self._begin.work
        took_ns = list(self._answers.took_ns)
        return Report(
            costs=costs,
            work=answers,
            figures={
                "per_s": answers / costs.window_s if costs.window_s else float("nan"),
                "answer_p50_ms": quantile_ms(took_ns, 0.5),
                "answer_p99_ms": quantile_ms(took_ns, 0.99),
            },
            lost=self._answers.bad,
        )


class _Answers:
    """What all connections together have got."""

    def __init__(self) -> None:
        self.good = 0
        self.bad = 0
        self.took_ns = array("q")


class _Client(asyncio.Protocol):
    """One connection: the next request goes when the last was answered."""

    def __init__(self, answers: _Answers) -> None:
        self._answers = answers
        self._parser = httptools.HttpResponseParser(self)
        self._stopped = False
        self._asked_at = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask first."""
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        """Read answers."""
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """Count an answer and ask again."""
        self._answers.took_ns.append(time.monotonic_ns() - self._asked_at)
        if self._parser.get_status_code() == 200:
            self._answers.good += 1
        else:
            self._answers.bad += 1
        if not self._stopped:
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count an answer that does not come."""
        if not self._stopped:
            self._answers.bad += 1

    def stop(self) -> None:
        """Ask no more, and leave."""
        self._stopped = True
        self._transport.close()

    def _ask(self) -> None:
        self._asked_at = time.monotonic_ns()
        self._transport.write(_REQUEST)
