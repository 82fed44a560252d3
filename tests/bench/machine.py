"""What the figures were taken on and with; without it they say nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from tests.bench import peers

Facts = dict[str, str]
"""By what they are called."""


def facts() -> Facts:
    """Return date, machine, versions and the command of this run."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python -m tests.bench.run", *sys.argv[1:]]),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load average": f"{os.getloadavg()[0]:.2f}",
        "lastword": _said("git", "describe", "--always", "--dirty"),
        "nginx": _said(peers.nginx_path() or "nginx", "-v").rpartition("/")[2],
        "envoy": _envoy_version(),
        "agentic-api": _said(peers.in_environment("agentic-server") or "agentic-server", "-V"),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _envoy_version() -> str:
    said = _said(
        peers.in_environment("envoy") or "envoy", "--version"
    )  # "… version: HASH/1.40.0/…"
    return said.rpartition("version: ")[2].partition("/")[2].partition("/")[0] or said


def _said(*command: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - asks the peers for their versions
            command, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "none"
    return (done.stdout + done.stderr).strip().rpartition("\n")[2]
