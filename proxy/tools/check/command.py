"""``lastword check`` as a process: its progress, its output, its signals, its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from proxy.tools.check.as_json import error_as_json, report_as_json
from proxy.tools.check.report import CheckError
from proxy.tools.check.runner import check
from proxy.tools.check.table import print_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from proxy.tools.check.options import CheckOptions

__all__ = ["run_check"]

_ENDING = (signal.SIGINT, signal.SIGTERM)
_SIGNALLED = 128  # a shell's status of a process that a signal has ended, less the signal's number


async def run_check(options: CheckOptions, *, as_json: bool) -> int:
    """Check, show the report on stdout and the progress on stderr, return the exit status.

    Ctrl-C and SIGTERM end it, and what it has begun on the server, with the status of the signal.
    """
    caught: list[signal.Signals] = []
    try:
        with _cancelled_by_signals(caught), _progress() as progress:
            report = await check(options, progress)
    except CheckError as error:
        if as_json:
            print(error_as_json(str(error)))  # noqa: T201 - what was asked for
        raise
    except asyncio.CancelledError:
        if not caught:
            raise
        print("lastword: interrupted; what was begun is cancelled", file=sys.stderr)  # noqa: T201
        return _SIGNALLED + caught[0]
    if as_json:
        print(report_as_json(report))  # noqa: T201 - what was asked for
    else:
        print_report(Console(highlight=False), report)
    return int(report.exit_status)


@contextlib.contextmanager
def _cancelled_by_signals(caught: list[signal.Signals]) -> Iterator[None]:
    """Cancel this task at the first signal; its clean-up is short, and no second one ends that."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def catch(number: signal.Signals) -> None:
        if task is not None and not caught:
            task.cancel()
        caught.append(number)

    for number in _ENDING:
        loop.add_signal_handler(number, catch, number)
    try:
        yield
    finally:
        for number in _ENDING:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show on stderr what is done now, if somebody is there to see it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield lambda what: status.update(Text(what))  # an address may look like markup
