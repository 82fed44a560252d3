"""Observe first, then switch on: what an operator does with a proxy set by its environment."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.captures import corrected
from tests.e2e.wire import post_stream
from tests.fake_scripts import answer, stream, vllm_events
from tests.prometheus import total, until_total
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.fake_vllm import Exchange, FakeVllm

EVENTS = vllm_events()
BODY = b"".join(EVENTS)
CORRECTIONS = "lastword_corrections_total"
EVENT = "the terminal event would be corrected"


class Deployed:
    """A proxy in a process of its own, and what it logs until it is told to stop."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, Any]) -> None:
        self.url = ready["url"]
        self.admin_url = ready["admin"]
        self._process = process

    async def stop(self) -> list[dict[str, Any]]:
        """Stop it as an orchestrator does, and return its log."""
        self._process.terminate()
        async with asyncio.timeout(2 * PATIENCE_S):
            _, log = await self._process.communicate()
        assert self._process.returncode == 0
        return [json.loads(line) for line in log.splitlines()]


@asynccontextmanager
async def deployed(**environment: str) -> AsyncIterator[Deployed]:
    """Start ``lastword serve`` with nothing but an environment."""
    settings = {"PORT": "0", "ADMIN_PORT": "0", "LOG_FORMAT": "json"} | environment
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "serve"),
        env=os.environ | {f"LASTWORD_{name}": value for name, value in settings.items()},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        ready: dict[str, Any] = {}
        async with asyncio.timeout(3 * PATIENCE_S):  # a busy machine takes long to import it all
            while ready.get("event") != "ready":
                ready = json.loads(await process.stderr.readline())
        yield Deployed(process, ready)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def truncated(exchange: Exchange) -> None:
    """Answer every create with a truncated stream, and /health as vLLM does."""
    health = exchange.request.target == b"/health"
    await (answer(200, body=b"") if health else stream(EVENTS))(exchange)


async def test_observe_then_on(fake: FakeVllm) -> None:
    """Observed bytes are untouched, what would change is told; a restart with ``on`` changes it."""
    fake.handler = truncated
    async with deployed(UPSTREAM=fake.url, CORRECT="observe") as proxy:
        assert (await post_stream(proxy.url)).body == BODY
        await until_total(proxy.admin_url, 1, CORRECTIONS, mode="observe")
        assert await total(proxy.admin_url, CORRECTIONS, mode="on") == 0
        log = await proxy.stop()
    (would,) = [line for line in log if line["event"] == EVENT]
    assert would["response_id"] == "resp_1"
    assert (would["says"], would["would_say"]) == ("response.completed", "response.incomplete")
    (request,) = [line for line in log if line["event"] == "request"]
    assert (request["mode"], request["corrected"]) == ("observe", True)

    async with deployed(UPSTREAM=fake.url, CORRECT="on") as proxy:
        assert (await post_stream(proxy.url)).body == corrected(BODY)
        await until_total(proxy.admin_url, 1, CORRECTIONS, mode="on", to="response.incomplete")
        assert await total(proxy.admin_url, CORRECTIONS) == 1
        log = await proxy.stop()
    assert not [line for line in log if line["event"] == EVENT]
    (request,) = [line for line in log if line["event"] == "request"]
    assert (request["mode"], request["corrected"]) == ("on", True)
