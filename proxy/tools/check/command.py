"""``lastword check`` as a process: its progress, its output, its signals, its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from proxy.tools.check.as_json import error_as_json, report_as_json
from proxy.tools.check.report import CheckError
from proxy.tools.check.runner import check
from proxy.tools.check.table import print_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from proxy.tools.check.options import CheckOptions

__all__ = ["run_check"]


async def run_check(options: CheckOptions, *, as_json: bool) -> int:
    """Check, show the report on stdout and the progress on stderr, return the exit status.

    SIGTERM ends it as Ctrl-C does: by cancelling the task, which then ends what it has begun.
    """
    try:
        with _ended_by_sigterm(), _progress() as progress:
            report = await check(options, progress)
    except CheckError as error:
        if as_json:
            print(error_as_json(str(error)))  # noqa: T201 - what was asked for
        raise
    if as_json:
        print(report_as_json(report))  # noqa: T201 - what was asked for
    else:
        print_report(Console(highlight=False), report)
    return int(report.exit_status)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is None or sys.platform == "win32":  # which has no such handlers
        yield
        return
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show on stderr what is done now, if somebody is there to see it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield status.update
