"""Go through all questions, within a time limit, and leave nothing running behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.tools.check import questions
from proxy.tools.check.background import STREAM_AND_REPLAYS, UNSTREAMED_RESPONSE
from proxy.tools.check.cancelling import CANCELLED_RESPONSE
from proxy.tools.check.foreground import TRUNCATED_STREAM, NoResponsesApiError
from proxy.tools.check.identify import choose_model, read_version
from proxy.tools.check.late_error import ERROR_IN_BACKGROUND, ERROR_IN_STREAM
from proxy.tools.check.probe import Answers, answering
from proxy.tools.check.report import Asked, NotApplicableError, NotAskedError, Report
from proxy.tools.check.server import Patience, Server, open_client

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.tools.check.options import CheckOptions
    from proxy.tools.check.probe import Probe

__all__ = ["check"]

_PROBES = (
    TRUNCATED_STREAM,
    ERROR_IN_STREAM,
    STREAM_AND_REPLAYS,
    UNSTREAMED_RESPONSE,
    CANCELLED_RESPONSE,
    ERROR_IN_BACKGROUND,
)


async def check(options: CheckOptions, progress: Callable[[str], None]) -> Report:
    """Ask the server, then the proxy in front of it if there is one.

    ``progress`` hears what is asked.  Raises ``CheckError`` if one of them cannot be asked at all.
    Background responses that were begun are cancelled and deleted in any case, also when the task
    is cancelled.
    """
    async with open_client(options.headers, options.ca_file) as client:
        servers = [
            Server(url, client, Patience(options.timeout_s))
            for url in (options.url, options.through)
            if url is not None
        ]
        versions = [await read_version(server) for server in servers]
        for server in servers:
            await choose_model(server, options.model)
        asked = [
            await _ask_all(server, version, progress)
            for server, version in zip(servers, versions, strict=True)
        ]
    return Report(*asked)


async def _ask_all(server: Server, version: str | None, progress: Callable[[str], None]) -> Asked:
    answers: Answers = {}
    try:
        with answering(answers, *questions.ALL):
            await _ask_in_time(server, answers, progress)
    finally:
        progress(f"{server.url}: ending what was begun")
        stored = await server.clean_up()
    in_order = {question: answers[question] for question in questions.ALL}
    return Asked(server.url, version, server.model, in_order, stored)


async def _ask_in_time(server: Server, answers: Answers, progress: Callable[[str], None]) -> None:
    """Ask the first question alone, which tells how to ask, and the others at once.

    Most of the time is spent on waiting for streams that ought to end.
    """
    waiting = list(_PROBES)

    async def ask(probe: Probe) -> None:
        with answering(answers, *probe.questions):
            await probe.ask(server, answers)
        waiting.remove(probe)
        if waiting:
            progress(f"{server.url}: {waiting[0].what} ({len(waiting)} of {len(_PROBES)} open)")

    total_s = server.patience.total_s
    first, *others = _PROBES
    progress(f"{server.url}: {first.what}")
    try:
        async with asyncio.timeout(total_s):
            await ask(first)
            async with asyncio.TaskGroup() as group:
                for probe in others:
                    group.create_task(ask(probe))
    except NoResponsesApiError as error:
        raise NotApplicableError("it has no Responses API") from error
    except TimeoutError as error:
        raise NotAskedError(f"the time was over ({total_s:g} s, --timeout-s)") from error
