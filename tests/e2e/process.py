"""A real ``lastword`` in a process of its own, and all that it says."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

COMMAND = ("-m", "proxy")


class LastwordProcess:
    """Where a running proxy listens, and what it has said."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child
        self.url = ""
        self.admin_url = ""
        self.said = bytearray()
        """Its stdout and stderr: all of it once the process has ended."""

    async def ready(self) -> None:
        """Wait for its first line, which says where it listens."""
        assert self.child.stdout is not None
        async with asyncio.timeout(60):
            while b"ready" not in self.said:
                line = await self.child.stdout.readline()
                assert line, bytes(self.said)
                self.said += line
        urls = dict(re.findall(rb"(url|admin)\W+(http://[0-9.:]+)", self.said))
        self.url, self.admin_url = urls[b"url"].decode(), urls[b"admin"].decode()

    async def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait for its end; return its exit status."""
        assert self.child.stdout is not None
        if self.child.returncode is None:
            self.child.send_signal(number)
            async with asyncio.timeout(60):
                self.said += await self.child.stdout.read()
                await self.child.wait()
        assert self.child.returncode is not None
        return self.child.returncode


@asynccontextmanager
async def lastword_process(
    upstream: str, *, command: Sequence[str] = COMMAND, **settings: Any
) -> AsyncIterator[LastwordProcess]:
    """Run a proxy until the block is left; then ``said`` is complete."""
    options = {"port": 0, "admin_port": 0, "heartbeat_s": 0, "upstream": upstream} | settings
    args = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, *command, "serve", *args),
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
