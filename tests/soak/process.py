"""The real proxy as a process of its own, and what /proc and its log tell of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

_START_LIMIT_S = 15.0
_STOP_LIMIT_S = 15.0


@dataclass(frozen=True)
class Sample:
    """What the proxy holds at one moment."""

    at_s: float
    rss_mb: float
    fds: int
    threads: int
    clients: int
    """Connections with clients, those of the admin port not counted."""
    upstreams: int
    """Connections to upstream, idle ones too."""


class ProxyProcess:
    """A running ``lastword serve``."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, upstream_port: int) -> None:
        self.process = process
        self.url = ""
        self.admin_url = ""
        self._log = log
        self._upstream_port = upstream_port

    async def ready(self) -> None:
        """Wait for the log to say where it listens."""
        async with asyncio.timeout(_START_LIMIT_S):
            while not self.url:
                if self.process.returncode is not None:
                    raise RuntimeError(self._log.read_text())
                for line in self.log():
                    if line.get("event") == "ready":
                        self.url, self.admin_url = line["url"], line["admin"]
                await asyncio.sleep(0.02)

    def sample(self, at_s: float) -> Sample:
        """Look at it."""
        folder = Path(f"/proc/{self.process.pid}")
        status = dict(
            line.split(":", 1)
            for line in (folder / "status").read_text().splitlines()
            if ":" in line
        )
        links = [_link(entry) for entry in (folder / "fd").iterdir()]
        inodes = {
            link.removeprefix("socket:[")[:-1] for link in links if link.startswith("socket:[")
        }
        port = int(self.url.rpartition(":")[2])
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ends = [
            (int(row[1].rpartition(":")[2], 16), int(row[2].rpartition(":")[2], 16))
            for row in rows
            if row[9] in inodes
        ]
        return Sample(
            at_s=at_s,
            rss_mb=int(status["VmRSS"].split()[0]) / 1024,
            fds=len(links),
            threads=int(status["Threads"]),
            clients=sum(local == port and remote != 0 for local, remote in ends),
            upstreams=sum(remote == self._upstream_port for _, remote in ends),
        )

    async def terminate(self) -> int:
        """Send SIGTERM and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(_STOP_LIMIT_S):
            return await self.process.wait()

    def log(self) -> list[dict[str, Any]]:
        """Return the log's whole lines; one that is not JSON is an error line of its own."""
        lines = self._log.read_text().splitlines(keepends=True)
        return [_record(line) for line in lines if line.endswith("\n")]

    def log_counts(self) -> Counter[tuple[str, str]]:
        """Count the log's lines by level and event."""
        return Counter((line["level"], line["event"]) for line in self.log())


@asynccontextmanager
async def running_proxy(
    upstream_port: int, log: Path, settings: Mapping[str, object], *, open_files: int | None = None
) -> AsyncIterator[ProxyProcess]:
    """Run ``lastword serve`` until the block is left, with a limit of open files if given."""
    limit = ("sh", "-c", f'ulimit -n {open_files} && exec "$0" "$@"') if open_files else ()
    options = {"port": 0, "admin_port": 0, "log_format": "json"} | dict(settings)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("LASTWORD_")
    }
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *limit,
            *(sys.executable, "-m", "proxy", "serve"),
            f"--upstream=http://127.0.0.1:{upstream_port}",
            *(f"--{name.replace('_', '-')}={value}" for name, value in options.items()),
            stderr=errors,
            env=environment,
        )
    try:
        proxy = ProxyProcess(process, log, upstream_port)
        await proxy.ready()
        yield proxy
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _link(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except FileNotFoundError:
        return ""


def _record(line: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return {"level": "error", "event": line.strip()}
    return record
