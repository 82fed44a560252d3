"""``lastword check`` as a process: its progress, its output, its signals, its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

import httpx
from rich.console import Console

from proxy.settings import origin
from proxy.tools.check.as_json import error_as_json, report_as_json
from proxy.tools.check.report import CheckError
from proxy.tools.check.runner import CheckOptions, check
from proxy.tools.check.table import print_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

__all__ = ["make_options", "run_check"]


def make_options(
    url: str,
    through: str | None = None,
    *,
    model: str | None,
    api_key: str | None,
    headers: Iterable[str],
    ca_file: Path | None,
    timeout_s: float,
) -> CheckOptions:
    """Return what the command line asks for; ``CheckError`` says what it may not."""
    sent = httpx.Headers({"authorization": f"Bearer {api_key}"} if api_key else {})
    for header in headers:
        name, colon, value = header.partition(":")
        if not (name.strip() and colon) or not header.isprintable():
            raise CheckError("--header: write it as 'NAME: VALUE'")
        sent[name.strip()] = value.strip()
    return CheckOptions(
        url=_address("URL", url),
        through=_address("--through", through) if through is not None else None,
        model=model,
        headers=sent,
        ca_file=ca_file,
        timeout_s=timeout_s,
    )


def _address(what: str, url: str) -> str:
    """Accept an address with or without the ``/v1`` that clients put behind it."""
    try:
        return origin(url).removesuffix("/v1")
    except ValueError as error:
        raise CheckError(f"{what} {error}") from error


async def run_check(options: CheckOptions, *, as_json: bool) -> int:
    """Check, show the report on stdout and the progress on stderr, return the exit status.

    SIGTERM ends it as Ctrl-C does: by cancelling the task, which then ends what it has begun.
    """
    task = asyncio.current_task()
    if task is not None:
        with contextlib.suppress(NotImplementedError):  # Windows has no such handlers
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        with _progress() as progress:
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
def _progress() -> Iterator[Callable[[str], None]]:
    """Show on stderr what is done now, if somebody is there to see it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield status.update
