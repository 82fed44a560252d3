"""One thread that writes: jobs from the event loop, committed in groups.

Why groups: a commit writes each page that it touched, so what comes within ``group_s``
(ten milliseconds) shares one.  Where a commit costs more, the next one comes later, so that
the thread takes a twentieth of a core, but within 100 ms: meanwhile the writers of copies
gather events, and an event costs a fifth.  A job that is not an append does not wait.

Why jobs are repeated: when a group fails (disk full), it is undone and each of its jobs
gets a transaction of its own, so that one job's failure is not everybody's.  A job must
therefore do all its work through the connection and through state that ``reload`` reads
back from there.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar, cast

from proxy.store import StoreError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.store import CopyKey

__all__ = ["GroupWriter"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_GROUP_BLOCKS = 256
_WAITING_JOBS = 1_024
_PAUSE_PER_CPU = 20
_PAUSE_AT_MOST_S = 0.100


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], object]
    key: CopyKey | None
    future: asyncio.Future[object]
    value: object = None
    error: Exception | None = None


class GroupWriter:
    """Runs jobs in order on one connection; used from one event loop.

    ``reload`` reads back what is kept of the tables in memory, after a rollback; ``mend``
    drops a copy that a failed job has left with a hole; ``upkeep`` does a little house-
    keeping and tells whether more is to do; ``failed`` says a database error in a sentence.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        reload: Callable[[], None],
        mend: Callable[[CopyKey], object],
        upkeep: Callable[[], bool],
        failed: Callable[[sqlite3.Error], StoreUnavailableError],
        group_s: float,
    ) -> None:
        self._connection = connection
        self._reload = reload
        self._mend = mend
        self._upkeep = upkeep
        self._failed = failed
        self._group_s = group_s
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._slots = asyncio.Semaphore(_WAITING_JOBS)
        self._full = threading.Event()
        self._closed = False
        self._stale = False
        self.holed: dict[CopyKey, None] = {}
        """Copies that a failed job has left with a hole, and that are still to be dropped."""
        self._told_holed = 0
        self._thread = threading.Thread(target=self._run, name="lastword-store-write", daemon=True)

    def start(self) -> None:
        """Start the thread; from here on the connection and the works are its own."""
        self._thread.start()

    async def run(
        self, work: Callable[[], _T], *, key: CopyKey | None = None, blocks: int | None = None
    ) -> _T:
        """Do the work in the thread and return once it is committed.

        ``key`` names the copy that cannot be kept if the database fails.  An append tells its
        ``blocks``: a few of them wait for others to share a commit.
        """
        await self._slots.acquire()
        if self._closed:
            self._slots.release()
            raise StoreUnavailableError("The store is closed: the proxy is shutting down.")
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._jobs.put(_Job(work, key, future))
        if blocks is None or blocks >= _GROUP_BLOCKS or self._jobs.qsize() >= _GROUP_BLOCKS:
            self._full.set()
        return cast("_T", await future)

    def stop(self) -> None:
        """Take no more jobs; those that wait are still done."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._full.set()

    def join(self) -> None:
        """Wait for the thread to end."""
        self._thread.join()

    def transact(self, works: Sequence[Callable[[], object]]) -> None:
        """Do the works in one transaction of the writer's thread, all or none."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            if self._stale:
                self._reload()
                self._stale = False
            for work in works:
                work()
            self._connection.execute("COMMIT")
        except BaseException:
            self._stale = True
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._abandon()

    def _serve(self) -> None:
        due = 0.0
        busy = True  # what is gone may have been left behind by the last process
        stopped = False
        while not stopped:
            group: list[_Job] = []
            with suppress(Empty):
                job = self._jobs.get(block=not busy)
                self._full.wait(max(0.0, due - time.monotonic()))
                self._full.clear()
                while job is not None:
                    group.append(job)
                    job = self._jobs.get_nowait()
                stopped = True
            if group:
                begun = time.thread_time()
                self._commit(group)
                self._answer(group)
                cost = _PAUSE_PER_CPU * (time.thread_time() - begun)
                pause = max(self._group_s, min(cost, _PAUSE_AT_MOST_S))
                due = time.monotonic() + pause
            busy = self._keep_house()

    def _keep_house(self) -> bool:
        try:
            return self._upkeep()
        except (sqlite3.Error, OSError) as error:
            _log.warning("Housekeeping on the store waits for the next write: %s.", error)
            return False

    def _commit(self, group: list[_Job]) -> None:
        self._mend_holed()
        try:
            self.transact([partial(_do, job) for job in group])
        except Exception as error:  # noqa: BLE001
            # Whatever it is goes to the caller of the job that met it; the thread goes on.
            if len(group) > 1:
                for job in group:
                    self._commit([job])
                return
            job = group[0]
            job.error = error
            if isinstance(error, sqlite3.Error):
                job.error = self._failed(error)
                job.error.__cause__ = error
                if job.key is not None:
                    self.holed[job.key] = None
                    self._mend_holed()

    def _mend_holed(self) -> None:
        if not self.holed:
            return
        try:
            self.transact([partial(self._mend, key) for key in self.holed])
        except sqlite3.Error as error:
            if len(self.holed) > self._told_holed:
                _log.warning(
                    "Copies to drop (%d) wait for the next write: %s.", len(self.holed), error
                )
            self._told_holed = len(self.holed)
        else:
            self.holed.clear()
            self._told_holed = 0

    def _abandon(self) -> None:
        """Leave nobody waiting, should a bug have ended the thread."""
        self._closed = True
        left: list[_Job] = []
        with suppress(Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.error = StoreUnavailableError("The store's writer has stopped.")
                    left.append(job)
        if left:
            self._answer(left)

    def _answer(self, group: list[_Job]) -> None:
        # The loop may be closed already: then nobody is left who could be told.
        with suppress(RuntimeError):
            group[0].future.get_loop().call_soon_threadsafe(self._settle, group)

    def _settle(self, group: list[_Job]) -> None:
        for job in group:
            self._slots.release()
            if job.future.done():  # its caller was cancelled
                continue
            if job.error is not None:
                job.future.set_exception(job.error)
            else:
                job.future.set_result(job.value)


def _do(job: _Job) -> None:
    """Do a job within its group: a refusal is an answer, any other error undoes the group."""
    job.error = None
    try:
        job.value = job.work()
    except StoreError as refusal:
        job.error = refusal
