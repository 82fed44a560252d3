"""A real ``lastword`` in a process of its own, and all that it says."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

COMMAND = ("-m", "proxy")
QUIET = {"port": 0, "admin_port": 0, "heartbeat_s": 0, "ready_needs_upstream": False}


class LastwordProcess:
    """Where a running proxy listens, and what it has said."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child
        self.url = ""
        self.admin_url = ""
        self.said = bytearray()
        """Its stdout and stderr: all of it once ``exit_status`` has returned."""

    async def ready(self) -> None:
        """Wait for the line that says where it listens."""
        assert self.child.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            while b"ready" not in self.said:
                line = await self.child.stdout.readline()
                assert line, bytes(self.said)
                self.said += line
        urls = dict(re.findall(rb"(url|admin)\W+(http://[0-9.:]+)", self.said))
        self.url, self.admin_url = urls[b"url"].decode(), urls[b"admin"].decode()

    def log(self) -> list[dict[str, Any]]:
        """Return what it has said, where that is a log in JSON."""
        return [json.loads(line) for line in self.said.splitlines()]

    async def exit_status(self) -> int:
        """Wait until it has ended."""
        assert self.child.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            self.said += await self.child.stdout.read()
            return await self.child.wait()

    async def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it, if it still runs, and wait for its end; return its exit status."""
        if self.child.returncode is None:
            self.child.send_signal(number)
        return await self.exit_status()


@asynccontextmanager
async def lastword_process(
    upstream: str,
    *,
    command: Sequence[str] = COMMAND,
    by_environment: bool = False,
    **settings: Any,
) -> AsyncIterator[LastwordProcess]:
    """Run a proxy until the block is left; then ``said`` is complete."""
    given = {"upstream": upstream} | QUIET | settings
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    variables = {f"LASTWORD_{name.upper()}": str(value) for name, value in given.items()}
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, *command, "serve", *(() if by_environment else options)),
        env=os.environ | variables if by_environment else None,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    process = LastwordProcess(child)
    try:
        await process.ready()
        yield process
        await process.stop()
    finally:
        if child.returncode is None:
            child.kill()
            await child.communicate()
