"""A proxy in a process of its own, which a test may kill at any moment."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.e2e.process import QUIET
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from multiprocessing.process import BaseProcess
    from pathlib import Path

COMMON = QUIET | {"log_format": "json"}
IMPORTS = ["proxy.gateway.server", "proxy.operations.logs", "proxy.store.redis", "uvloop"]


@asynccontextmanager
async def killed_fork(log: Path, **settings: Any) -> AsyncIterator[str]:
    """Start a proxy, give its URL, kill it in the end (SIGKILL).

    It takes no second of imports: the process is forked from one that has them.
    """
    async with forked(log, **settings) as proxy:
        yield proxy.url


class Forked:
    """A proxy in a process that a test can stop in every way."""

    def __init__(self, process: BaseProcess, url: str, admin_url: str) -> None:
        self._process = process
        self.url = url
        self.admin_url = admin_url

    async def kill(self) -> None:
        """Kill it (SIGKILL)."""
        self._process.kill()
        await asyncio.to_thread(self._process.join)

    def freeze(self) -> None:
        """Let it stand still: its connections stay open."""
        os.kill(self._process.pid or 0, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on as if no time had passed."""
        os.kill(self._process.pid or 0, signal.SIGCONT)


@asynccontextmanager
async def forked(log: Path, **settings: Any) -> AsyncIterator[Forked]:
    """Run a proxy in a process of its own; it is killed in the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *IMPORTS])
    process = context.Process(target=_serve, args=(str(log), COMMON | settings))
    process.start()
    try:
        yield Forked(process, *await _urls(log))
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        process.close()


def _serve(log: str, settings: dict[str, Any]) -> None:
    import uvloop  # noqa: PLC0415 -- in the process that is forked from

    from proxy.gateway.server import serve  # noqa: PLC0415
    from proxy.operations.logs import configure_logs  # noqa: PLC0415
    from proxy.settings import load_settings  # noqa: PLC0415

    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    configure_logs("json")
    uvloop.run(serve(load_settings(**settings)))


async def _urls(log: Path) -> tuple[str, str]:
    """Wait until the proxy says that it is ready, and where."""
    async with asyncio.timeout(2 * PATIENCE_S):  # a busy machine takes long to import it all
        while True:
            if urls := _told(log):
                return urls
            await asyncio.sleep(0.01)


def _told(log: Path) -> tuple[str, str] | None:
    for line in log.read_text().splitlines() if log.exists() else ():
        if '"ready"' in line and line.endswith("}"):
            told = json.loads(line)
            return told["url"], told["admin"]
    return None
