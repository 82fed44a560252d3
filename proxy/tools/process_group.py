"""The processes of one group: who they are, and how all of them end."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "end_group", "processes_of_group"]

_POLL_S = 0.1


@dataclass(frozen=True)
class Process:
    """One process of a group: its id and its command line."""

    pid: int
    command: str


def end_group(leader: subprocess.Popen[bytes], limit_s: float) -> None:
    """Terminate the group, give it `limit_s`, kill what is left and wait until nothing is."""
    group = leader.pid
    try:
        _signal_group(group, signal.SIGTERM)
        _wait_for_group(leader, limit_s)
    finally:
        # Also if that wait was interrupted: a second Ctrl-C must leave nothing behind either.
        _signal_group(group, signal.SIGKILL)
        _wait_for_group(leader, limit_s)


def _wait_for_group(leader: subprocess.Popen[bytes], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    # The poll reaps the leader, which otherwise stays as a zombie.
    while (leader.poll() is None or processes_of_group(leader.pid)) and (
        time.monotonic() < deadline
    ):
        time.sleep(_POLL_S)


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        # Nobody is left; macOS says "not permitted" where only zombies are.
        return


def processes_of_group(group: int) -> list[Process]:
    """Return the group's processes that still run; zombies that nobody reaps are not among them."""
    if Path("/proc/self/stat").exists():
        return list(_read_proc(group))
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,pgid=,state=,command="],  # noqa: S607 - where ps is, differs
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
    ).stdout
    rows = (line.split(maxsplit=3) for line in listing.splitlines())
    return [
        Process(int(pid), "".join(command))
        for pid, pgid, state, *command in rows
        if int(pgid) == group and not state.startswith("Z")
    ]


def _read_proc(group: int) -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # `pid (name) state ppid pgrp ...`, where the name may hold spaces and parentheses.
            stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:  # it has just ended
            continue
        state, _, pgrp = stat.rpartition(")")[2].split()[:3]
        if int(pgrp) == group and state not in "ZX":
            yield Process(int(entry.name), command.decode(errors="replace").strip())
