"""Child processes bound to one core, and what /proc says of their cost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_START_LIMIT_S: Final = 15.0
_STOP_LIMIT_S: Final = 5.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class StartError(Exception):
    """A process did not come up; the message has its last words."""


@dataclass(frozen=True)
class Running:
    """A server that listens; pid 0 is none at all."""

    port: int
    pid: int


@contextlib.contextmanager
def pinned(
    command: Sequence[str],
    *,
    core: int,
    log: Path,
    stdout: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command on one core until the block is left; then it and its children are ended.

    ``environment`` is added to what this process has, without the settings and proxies in it.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("LASTWORD_") and not name.lower().endswith("_proxy")
    }
    ours = os.sched_getaffinity(0)
    with log.open("ab") as errors:
        os.sched_setaffinity(0, {core})  # inherited, so that no thread or child slips through
        try:
            process = subprocess.Popen(  # noqa: S603 - the benchmark's own commands
                command,
                stdin=subprocess.DEVNULL,
                stdout=errors if stdout is None else stdout,
                stderr=errors,
                env=inherited | dict(environment or {}),
            )
        finally:
            os.sched_setaffinity(0, ours)
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    members = family(process.pid)
    process.terminate()
    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(_STOP_LIMIT_S)
    if process.stdout is not None:
        process.stdout.close()


def free_port() -> int:
    """Return a loopback port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def await_port(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return once the process listens; raises ``StartError`` if it does not come up."""
    end = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise StartError(log.read_text(errors="replace")[-1000:].strip() or "it does not listen")


@contextlib.contextmanager
def serving(
    command: Sequence[str],
    *,
    port: int,
    core: int,
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """Run a server on one core, and give it when it listens."""
    with pinned(command, core=core, log=log, environment=environment) as process:
        await_port(process, port, log)
        yield Running(port, process.pid)


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    members = [pid]
    for member in members:  # it grows while it is walked
        for children in Path(f"/proc/{member}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                members += map(int, children.read_text().split())
    return members


def cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU time that these processes have used, user and system."""
    ticks = 0
    for pid in pids:
        text = Path(f"/proc/{pid}/stat").read_text()
        after_name = text.rpartition(")")[2].split()
        ticks += int(after_name[11]) + int(after_name[12])
    return ticks / _TICKS


def rss_mb(pids: Sequence[int]) -> float:
    """Return the sum of the memory that these processes hold."""
    return _status_mb(pids, "VmRSS:")


def peak_rss_mb(pids: Sequence[int]) -> float:
    """Return the sum of the most memory that each of these processes held."""
    return _status_mb(pids, "VmHWM:")


def _status_mb(pids: Sequence[int], field: str) -> float:
    kilobytes = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field):
                kilobytes += int(line.split()[1])
    return kilobytes / 1024


def core_busy_s(core: int) -> float:
    """Return how long a core was busy since the machine's start, whoever used it."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name == f"cpu{core}":
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            return (user + nice + system + irq + softirq + steal) / _TICKS
    raise LookupError(core)
