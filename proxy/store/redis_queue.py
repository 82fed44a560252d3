"""Scripts in a queue, sent in pipelined groups by one task.

Why groups: a round trip costs more than a script, so what comes while the last group is on its
way shares the next one.

Why appends are repeated: while the server is away a writer's batch may wait for it, since nothing
behind it is sent before.  A script knows a batch that it has seen, so one whose answer was lost
is not stored twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proxy.store import StoreUnavailableError

if TYPE_CHECKING:
    from proxy.store.redis_link import Call, Link

__all__ = ["ScriptQueue"]

_GROUP_CALLS = 256
_GROUP_BYTES = 4 * 1024 * 1024
_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


@dataclass(slots=True, eq=False)
class _Job:
    call: Call
    bytes: int
    future: asyncio.Future[Any]
    give_up_at: float  # the loop's time


class ScriptQueue:
    """Sends scripts in order, in groups, on one event loop.

    A patient script waits up to ``patience_s`` for a server that is away; the others fail with it.
    """

    def __init__(self, link: Link, *, patience_s: float = 0.0) -> None:
        self._link = link
        self._patience_s = patience_s
        self._jobs: deque[_Job] = deque()
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    async def run(self, call: Call, *, size: int = 0, waits: bool = False) -> Any:
        """Run a script and return its answer; raises ``StoreUnavailableError``.

        ``waits``: it may wait for a server that is away.
        """
        if self._closing:
            raise StoreUnavailableError("The store is closed: the proxy is shutting down.")
        if self._task is None:
            self._task = asyncio.create_task(self._serve())  # noqa: TID251 - awaited by aclose
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._patience_s if waits else 0.0
        job = _Job(call, size, loop.create_future(), give_up_at)
        self._jobs.append(job)
        self._wake.set()
        if not waits:
            self._hurry.set()
        return await job.future

    async def aclose(self) -> None:
        """Send what waits, once more if the server is away, and stop."""
        self._closing = True
        self._wake.set()
        self._hurry.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        for job in self._jobs:
            _settle(job, StoreUnavailableError("The store's queue has stopped."))

    async def _serve(self) -> None:
        pause_s = 0.0
        while self._jobs or not self._closing:
            if not self._jobs:
                self._wake.clear()
                await self._wake.wait()
            if pause_s:
                await self._pause(pause_s)
            group = self._take_group()
            if not group:
                continue
            try:
                answers = await self._link.run_all([job.call for job in group])
            except StoreUnavailableError as error:
                answers = [error] * len(group)
            waiting = self._settle(group, answers)
            self._jobs.extendleft(reversed(waiting))
            pause_s = min(max(_PAUSE_S, pause_s * 2), _LONGEST_PAUSE_S) if waiting else 0.0

    async def _pause(self, pause_s: float) -> None:
        """Leave a server that is away alone for a moment, unless somebody waits for an answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._hurry.wait()
        self._hurry.clear()

    def _take_group(self) -> list[_Job]:
        group: list[_Job] = []
        size = 0
        while self._jobs and len(group) < _GROUP_CALLS:
            if group and size + self._jobs[0].bytes > _GROUP_BYTES:
                break
            job = self._jobs.popleft()
            if not job.future.done():  # its caller was cancelled before anything was sent
                group.append(job)
                size += job.bytes
        return group

    def _settle(self, group: list[_Job], answers: list[Any]) -> list[_Job]:
        """Answer a group; return the jobs that wait for the server."""
        now = asyncio.get_running_loop().time()
        waiting = []
        for job, answer in zip(group, answers, strict=True):
            away = isinstance(answer, StoreUnavailableError)
            if away and job.give_up_at > now and not self._closing:
                waiting.append(job)
            else:
                _settle(job, answer)
        return waiting


def _settle(job: _Job, answer: Any) -> None:
    if job.future.done():  # its caller was cancelled
        return
    if isinstance(answer, Exception):
        job.future.set_exception(answer)
    else:
        job.future.set_result(answer)
