"""SIGTERM, drain, and what becomes of the streams that still run."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.process import lastword_process
from tests.e2e.wire import RESPONSES, connect, exchange
from tests.fake_responses_api import FakeResponsesApi
from tests.fake_scripts import stream, vllm_events
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from tests.conftest import StartLastword
    from tests.e2e.process import LastwordProcess
    from tests.e2e.wire import Answer, Wire
    from tests.fake_vllm import FakeVllm

    Serve = Callable[..., Awaitable[LastwordProcess]]

EVENTS = vllm_events()


@pytest.fixture
async def serve(fake: FakeVllm) -> AsyncIterator[Serve]:
    """Give a function that starts the real command in front of the fake."""
    async with AsyncExitStack() as started:

        async def start(**settings: Any) -> LastwordProcess:
            return await started.enter_async_context(lastword_process(fake.url, **settings))

        yield start


async def read_events(wire: Wire, answer: Answer, events: int) -> None:
    """Read so many events, in however many chunks they come."""
    while answer.body.count(b"\n\n") < events:
        answer.chunks.append(await wire.chunk())


async def not_ready(client: httpx.AsyncClient, admin: str) -> None:
    """Ask the admin port until it says that the proxy is not ready."""
    while (await client.get(f"{admin}/readyz")).status_code != 503:  # noqa: ASYNC110 - it is asked
        await asyncio.sleep(0.01)


async def test_idle_proxy_exits_with_0(serve: Serve) -> None:
    """Without requests SIGTERM ends the process at once, as do SIGINT and SIGHUP."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        proxy = await serve()
        assert await proxy.stop(number) == 0


async def test_running_stream_may_finish(fake: FakeVllm, serve: Serve) -> None:
    """Within the grace a running stream goes on to its end; new requests are 503."""
    proxy = await serve(shutdown_grace_s=20)
    fake.script(stream(EVENTS, gated=True))
    fake.gate("0").open()
    async with connect(proxy.url) as wire, connect(proxy.url) as later:
        await wire.post()
        answer = await wire.head()
        answer.chunks.append(await wire.chunk())
        proxy.child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient(trust_env=False) as client:
            await not_ready(client, proxy.admin_url)
            assert (await client.get(f"{proxy.admin_url}/livez")).status_code == 200
        await later.post()
        refused = await later.answer()
        assert refused.status == 503
        assert refused.values("retry-after") == [b"1"]
        for number in range(len(EVENTS)):
            fake.gate(str(number)).open()
        fake.gate("ending").open()
        await wire.body(answer)
    assert answer.ending == "clean"
    assert b"event: response.incomplete\n" in answer.body
    assert await proxy.exit_status() == 0


@pytest.mark.parametrize("again", [False, True], ids=["grace over", "second signal"])
async def test_what_is_left_is_ended_properly(
    again: bool,  # noqa: FBT001 - a parameter
    fake: FakeVllm,
    serve: Serve,
) -> None:
    """After the grace, or a second signal, a stream ends with response.failed that says why."""
    proxy = await serve(shutdown_grace_s=30 if again else 0.2)
    fake.script(stream(EVENTS[:2], ending="hang"))
    async with connect(proxy.url) as wire:
        await wire.post()
        answer = await wire.head()
        await read_events(wire, answer, 2)
        proxy.child.send_signal(signal.SIGTERM)
        if again:
            async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient(trust_env=False) as client:
                await not_ready(client, proxy.admin_url)
            proxy.child.send_signal(signal.SIGTERM)
        await wire.body(answer)
    assert answer.ending == "cut"
    failed = answer.body.removeprefix(b"".join(EVENTS[:2]))
    assert failed.startswith(b"event: response.failed\n")
    assert b"The proxy is shutting down." in failed
    assert await proxy.exit_status() == 0


@pytest.mark.parametrize("background", ["proxy", "upstream"])
async def test_runs_at_shutdown(
    background: str, tmp_path: Path, fake: FakeVllm, serve: Serve
) -> None:
    """A run of the proxy's own fails; one that vLLM makes is left to it, without a false ending."""
    api = FakeResponsesApi(fake, gated=True)
    settings = {
        "background": background,
        "store": f"sqlite:{tmp_path}/copies.db",
        "shutdown_grace_s": 0.2,
    }
    proxy = await serve(**settings)
    body = {"stream": True, "background": True, "request_id": "r"}
    async with connect(proxy.url) as wire:
        await wire.post(json.dumps(body).encode())
        await fake.until(lambda: "r" in api.runs)
        api.step("r", 3)
        answer = await wire.head()
        await read_events(wire, answer, 3)
        proxy.child.send_signal(signal.SIGTERM)
        await wire.body(answer)
    assert answer.ending == "clean"
    assert await proxy.exit_status() == 0
    failed = b"event: response.failed\n" in answer.body
    assert failed is (background == "proxy")

    again = await serve(**settings)
    api.step("r", 100)
    replay = await exchange(again.url, "GET", f"{RESPONSES}/r?stream=true")
    assert replay.ending == "clean"
    assert replay.body.startswith(answer.body)
    assert (replay.body == answer.body) is failed
    if not failed:
        assert replay.body == b"".join(api.runs["r"].events)


async def test_drain_waits_until_empty(fake: FakeVllm, lastword: StartLastword) -> None:
    """/drain answers once nothing runs any more, and the proxy is not ready from then on."""
    proxy = await lastword()
    fake.script(stream(EVENTS, gated=True))
    fake.gate("0").open()
    async with connect(proxy.url) as wire, httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{proxy.admin_url}/readyz")).status_code == 200
        await wire.post()
        answer = await wire.head()
        await wire.chunk()
        draining = asyncio.create_task(client.post(f"{proxy.admin_url}/drain", timeout=PATIENCE_S))
        async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient(trust_env=False) as other:
            await not_ready(other, proxy.admin_url)
        assert not draining.done()
        for number in range(len(EVENTS)):
            fake.gate(str(number)).open()
        fake.gate("ending").open()
        await wire.body(answer)
        drained = await draining
    assert drained.json() == {"drained": True, "active": 0}
    assert answer.ending == "clean"


async def test_lastword_drain(
    fake: FakeVllm, lastword: StartLastword, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command drains a running proxy where it is told, or its environment tells, to look."""
    proxy = await lastword()

    async def drain(*args: str) -> tuple[int | None, bytes]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", "drain", *args),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(PATIENCE_S):
            out, _ = await process.communicate()
        return process.returncode, out

    assert await drain("--admin", proxy.admin_url) == (0, b"drained\n")
    status, out = await drain("--admin", "http://127.0.0.1:1")
    assert status == 2
    assert b"could not be asked to drain" in out
    monkeypatch.setenv("LASTWORD_ADMIN_HOST", "0.0.0.0")  # noqa: S104 - all addresses: also this one
    monkeypatch.setenv("LASTWORD_ADMIN_PORT", proxy.admin_url.rpartition(":")[2])
    assert await drain() == (0, b"drained\n")


async def test_drain_delay(fake: FakeVllm, lastword: StartLastword) -> None:
    """For drain_delay_s new requests are still served, though the proxy is not ready."""
    proxy = await lastword(drain_delay_s=3.0)
    fake.script(stream(EVENTS))
    async with httpx.AsyncClient(trust_env=False) as client:
        draining = asyncio.create_task(client.post(f"{proxy.admin_url}/drain", timeout=PATIENCE_S))
        async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient(trust_env=False) as other:
            await not_ready(other, proxy.admin_url)
        async with connect(proxy.url) as wire:
            await wire.post()
            answer = await wire.answer()
        await draining
        async with connect(proxy.url) as wire:
            await wire.post()
            refused = await wire.answer()
    assert (answer.status, refused.status) == (200, 503)
