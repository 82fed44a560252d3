"""Logs: one form for all, whoever logs, and nothing that a log does can stop the proxy."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import asyncio, logging, os, sys, warnings
import structlog
from proxy.operations.logs import configure_logs

configure_logs(sys.argv[1], sys.argv[2])
log = structlog.stdlib.get_logger("lastword")
log.debug("a detail")
log.info("ready", url="http://127.0.0.1", path=sys.path, missing=None)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("it failed", name="caf\\udce9")
logging.getLogger("uvicorn.error").info("Started server process")
logging.getLogger("uvicorn.error").warning("Invalid %s", "request")
logging.getLogger("odd").log(5, "too fine")
logging.getLogger("odd").log(35, "between levels")
warnings.warn("soon gone")

async def forget():
    async def fail():
        raise ValueError("nobody awaits this")
    task = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del task

asyncio.run(forget())
os.close(2)
log.error("nobody reads this")
logging.error("nor this")
print("alive")
"""


def run(log_format: str, log_level: str) -> str:
    """Run the program and return what it logged."""
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", PROGRAM, log_format, log_level],
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout == "alive\n"
    return done.stderr


def told(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return level and event of each line."""
    return [(line["level"], line["event"].split(":")[0]) for line in lines]


OURS = [("error", "it failed"), ("warning", "Invalid request"), ("warning", "between levels")]
LAST = [("error", "Task exception was never retrieved\nfuture")]


def test_json() -> None:
    """Every line is one JSON object: ours, uvicorn's, asyncio's, Python's warnings."""
    lines = [json.loads(line) for line in run("json", "info").splitlines()]
    assert told([lines[0]]) == [("info", "ready")]
    assert told(lines[1:4]) == OURS
    assert lines[4]["level"] == "warning"
    assert "soon gone" in lines[4]["event"]
    assert told(lines[5:]) == LAST
    assert lines[0]["url"] == "http://127.0.0.1"
    assert "ZeroDivisionError" in lines[1]["exception"]
    assert lines[2]["logger"] == "uvicorn.error"
    assert "ValueError: nobody awaits this" in lines[5]["exception"]
    assert all(line["timestamp"].endswith("Z") for line in lines)


@pytest.mark.parametrize(("level", "least"), [("debug", "debug"), ("warning", "error")])
def test_level(level: str, least: str) -> None:
    """What is less than the level is not logged, whoever logs it."""
    lines = [json.loads(line) for line in run("json", level).splitlines()]
    events = told(lines)
    assert events[0][0] == least
    assert (("debug", "a detail") in events) is (level == "debug")
    assert all(line in events for line in [*OURS, *LAST])
    assert "Started server process" not in [event for _, event in events]


def test_console() -> None:
    """Where it is no terminal there are no colours; a line says when, how bad, what."""
    text = run("console", "info")
    assert "\x1b" not in text
    assert "[info     ] ready " in text
    assert "ZeroDivisionError" in text
    assert "[warning  ] Invalid request" in text


def test_no_stderr_at_all() -> None:
    """A proxy that was started with its stderr closed says nothing and serves."""
    program = """
import logging, structlog
from proxy.operations.logs import configure_logs
configure_logs("auto")
structlog.get_logger().error("nobody reads this")
logging.error("nor this")
print("alive")
"""
    done = subprocess.run(  # noqa: S603 - our own program
        ["/bin/sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program],
        stdout=subprocess.PIPE,
        check=True,
    )
    assert done.stdout == b"alive\n"
