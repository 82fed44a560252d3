"""Fixtures for all tests: a scriptable upstream and the real proxy in front of it."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Protocol

import hypothesis
import pytest

from tests.fake_vllm import FakeVllm
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


# The suite tries the same examples each time: it must not fail one day for what was there the day
# before. HYPOTHESIS_PROFILE=default searches on, and so does `make fuzz`.
hypothesis.settings.register_profile("suite", derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


class Lastword(Protocol):
    """A running proxy."""

    url: str
    """Its traffic port."""
    admin_url: str


class StartLastword(Protocol):
    """Starts a proxy; it is stopped when the test ends."""

    async def __call__(self, **settings: Any) -> Lastword:
        """Start a proxy in front of the fake, with these settings over the tests' own."""


QUIET: dict[str, Any] = {
    "port": 0,
    "admin_port": 0,
    "background": "pass",
    "heartbeat_s": 0,
    "ready_needs_upstream": False,
    "log_requests": False,
}
"""What a test gets unless it says otherwise: free ports and nothing of the proxy's own."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take settings from the test alone, and let no proxy of the environment step in."""
    for name in os.environ:
        if name.upper().startswith("LASTWORD_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Give a real Redis 6.2, one for all tests of a process: each takes a key prefix of its own."""
    with RedisServer("redis", tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Give a real Valkey 9, one for all tests of a process."""
    with RedisServer("valkey", tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Nothing of a test runs on after it: no task of the proxy, the fake or the client.

    The fake asks for it, so every end-to-end test is held to it.
    """
    before = asyncio.all_tasks()
    yield
    left = set[asyncio.Task[Any]]()
    for _ in range(200):
        left = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
        if not left:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"still running: {left}")


@pytest.fixture
async def fake(no_task_left: None) -> AsyncIterator[FakeVllm]:
    """Give a scriptable upstream that listens on a port of its own."""
    async with FakeVllm() as fake:
        yield fake


@pytest.fixture
async def lastword(fake: FakeVllm) -> AsyncIterator[StartLastword]:
    """Give a function that starts the real proxy in front of the fake, on real sockets."""
    running: list[_Running] = []

    async def start(**settings: Any) -> Lastword:
        running.append(_Running({"upstream": fake.url} | settings))
        return await running[-1].started

    yield start
    for proxy in reversed(running):
        await proxy.stop()


class _Running:
    """One proxy in a task of its own: it is started and stopped by the same task.

    This is the one place that knows how the proxy is started.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.started: asyncio.Future[Lastword] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._run(settings))

    async def stop(self) -> None:
        """Stop it and see to it that it did not fail."""
        self._stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await self._task

    async def _run(self, settings: dict[str, Any]) -> None:
        from proxy.gateway.server import running  # noqa: PLC0415 -- unit tests need no server
        from proxy.settings import Settings  # noqa: PLC0415

        try:
            defaults = {key: value for key, value in QUIET.items() if key in Settings.model_fields}
            async with running(Settings(**defaults | settings)) as proxy:
                self.started.set_result(proxy)
                await self._stop.wait()
        except BaseException as error:
            if self.started.done():
                raise
            self.started.set_exception(error)
