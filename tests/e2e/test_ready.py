"""The admin port: whether new requests should be sent here, and why not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from proxy.upstream import probe
from proxy.upstream.client import UpstreamClient
from tests.e2e.wire import Answer, exchange, post_stream
from tests.fake_scripts import (
    answer,
    close_without_answer,
    echo,
    garbage,
    hang,
    stream,
    vllm_events,
)
from tests.prometheus import total
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import Exchange, FakeVllm

EVENTS = vllm_events()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask upstream again at once: each test says when it answers."""
    monkeypatch.setattr(probe, "EVERY_S", 0.01)


class Health:
    """The fake's /health: the n-th request is answered when the test comes to it."""

    def __init__(self, fake: FakeVllm) -> None:
        self.fake = fake
        self.asked = 0
        self.answered = 0
        self.status = 0
        fake.handler = self

    async def __call__(self, exchange: Exchange) -> None:
        """Wait for the test, then answer."""
        number = self.asked
        self.asked += 1
        await exchange.gate(str(number))
        await exchange.answer(self.status, (), b"")

    async def answer(self, *statuses: int) -> None:
        """Answer the next requests, and wait until the proxy has taken the last answer."""
        for status in statuses:
            await self.fake.gate(str(self.answered)).arrived()
            self.status = status
            self.fake.gate(str(self.answered)).open()
            self.answered += 1
            await self.fake.gate(str(self.answered)).arrived()


async def readyz(admin_url: str) -> Answer:
    """Ask whether the proxy is ready; the status must say what the body says."""
    told = await exchange(admin_url, "GET", "/readyz")
    assert told.status == (200 if told.json()["ready"] else 503)
    return told


async def is_ready(admin_url: str) -> bool:
    """Ask whether the proxy is ready; the metrics must agree."""
    told = (await readyz(admin_url)).json()
    ready = bool(told["ready"])
    assert told["checks"]["upstream"]["ok"] == ready
    assert await total(admin_url, "lastword_ready") == ready
    assert await total(admin_url, "lastword_upstream_up") == ready
    return ready


async def test_verdict_on_upstream(fake: FakeVllm, lastword: StartLastword) -> None:
    """Not ready until the first success; from there on two equal results in a row decide."""
    health = Health(fake)
    proxy = await lastword(ready_needs_upstream=True)
    assert not await is_ready(proxy.admin_url)
    told = (await readyz(proxy.admin_url)).json()["checks"]["upstream"]
    assert told == {"ok": False, "needed": True, "detail": "It was not asked yet."}
    for statuses, ready in [
        ([503, 503], False),
        ([200], True),  # the first success
        ([500], True),  # one is not enough
        ([200, 503], True),  # nor are two with a success between them
        ([502], False),
        ([200], False),
        ([503, 404], False),
        ([401], True),  # any answer below 500: a server without the route, or with a key for it
    ]:
        await health.answer(*statuses)
        assert await is_ready(proxy.admin_url) is ready, statuses
    await health.answer(503, 503)
    told = (await readyz(proxy.admin_url)).json()["checks"]["upstream"]
    assert told["detail"] == "It answers GET /health with 503."
    assert {bytes(request.target) for request in fake.requests} == {b"/health"}
    assert fake.connections == 1, "it asks on the connection that it has"
    assert await total(proxy.admin_url, "lastword_upstream_errors_total") == 0


async def endless(exchange: Exchange) -> None:
    """Answer, and never end."""
    await exchange.respond(200)
    while True:
        await exchange.send(b"x" * 8192)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (garbage, "cannot be read|not valid HTTP|not HTTP"),
        (close_without_answer, "broke off before it answered"),
        (hang, "did not answer GET /health within"),
        (endless, ""),
        (stream([b"x"], ending="cut"), "broke off its answer"),
    ],
    ids=["garbage", "closed", "silent", "endless", "cut"],
)
async def test_whatever_upstream_does(
    trouble: Any,
    words: str,
    fake: FakeVllm,
    lastword: StartLastword,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The probe survives everything, asks on, and says what it met; a long answer is one, too."""
    monkeypatch.setattr(probe, "ANSWER_S", 0.3)
    fake.handler = trouble
    proxy = await lastword(ready_needs_upstream=True)
    await fake.exchange(1)
    told = (await readyz(proxy.admin_url)).json()
    assert told["ready"] is (not words)
    assert any(word in told["checks"]["upstream"]["detail"] for word in words.split("|"))
    fake.handler = answer(200)
    await until_ready(proxy.admin_url)


async def test_fault_of_our_own(
    fake: FakeVllm, lastword: StartLastword, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a fault inside the proxy is only a failed probe."""
    asked = asyncio.Event()

    async def broken(*_: object) -> Any:
        asked.set()
        raise RuntimeError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(UpstreamClient, "open", broken)
        proxy = await lastword(ready_needs_upstream=True)
        await asked.wait()
        assert b"a fault" in (await readyz(proxy.admin_url)).body
    fake.handler = answer(200)
    await until_ready(proxy.admin_url)


async def until_ready(admin_url: str) -> None:
    """Ask until the proxy is ready."""
    async with asyncio.timeout(PATIENCE_S):
        while not (await readyz(admin_url)).json()["ready"]:
            pass


async def test_upstream_that_is_not_there_yet(
    fake: FakeVllm, lastword: StartLastword, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sidecar starts before vLLM: it lives, and says why it is not ready until vLLM listens."""
    fake.handler = answer(200)
    await fake.stop_listening()
    proxy = await lastword(ready_needs_upstream=True)
    async with asyncio.timeout(PATIENCE_S):
        while b"refused" not in (await readyz(proxy.admin_url)).body:
            pass
    assert (await exchange(proxy.admin_url, "GET", "/livez")).status == 200
    assert capsys.readouterr().out.count("upstream is not well yet") == 1
    await fake.listen()
    await until_ready(proxy.admin_url)


async def test_upstream_that_is_not_needed(fake: FakeVllm, lastword: StartLastword) -> None:
    """A gateway's upstream is not asked at all, and its metric is no alert."""
    proxy = await lastword(ready_needs_upstream=False)
    told = (await readyz(proxy.admin_url)).json()
    assert told["ready"]
    assert told["checks"]["upstream"]["ok"] is told["checks"]["store"]["ok"] is None
    for name in ("upstream", "store"):
        up = await total(proxy.admin_url, f"lastword_{name}_up")
        assert up != up, "NaN"  # noqa: PLR0124
    assert fake.requests == []


async def test_store_that_is_away(fake: FakeVllm, lastword: StartLastword) -> None:
    """A store is reported, and never a reason: streams pass without it."""
    proxy: Any = await lastword(background="proxy")
    told = (await readyz(proxy.admin_url)).json()["checks"]["store"]
    assert told == {"ok": True, "needed": False, "detail": "It holds 0 bytes."}
    assert await total(proxy.admin_url, "lastword_store_up") == 1
    await proxy.gateway.runs.store.aclose()
    told = (await readyz(proxy.admin_url)).json()
    assert told["ready"]
    assert told["checks"]["store"]["ok"] is False
    assert "closed" in told["checks"]["store"]["detail"]
    assert await total(proxy.admin_url, "lastword_store_up") == 0
    fake.handler = stream(EVENTS)
    assert (await post_stream(proxy.url)).ending == "clean"


async def test_drain(lastword: StartLastword) -> None:
    """A draining proxy is not ready, and says that this is why."""
    proxy = await lastword()
    assert (await readyz(proxy.admin_url)).json()["checks"]["draining"]["ok"]
    assert (await exchange(proxy.admin_url, "POST", "/drain", body=b"")).status == 200
    told = (await readyz(proxy.admin_url)).json()
    assert not told["ready"]
    assert not told["checks"]["draining"]["ok"]
    assert await total(proxy.admin_url, "lastword_ready") == 0


async def test_openapi_on_the_admin_port_alone(fake: FakeVllm, lastword: StartLastword) -> None:
    """The admin routes are described there; no page is, since it would come from elsewhere."""
    proxy = await lastword()
    described = (await exchange(proxy.admin_url, "GET", "/openapi.json")).json()
    assert {"/livez", "/readyz", "/metrics", "/drain"} <= set(described["paths"])
    assert set(described["paths"]["/readyz"]["get"]["responses"]) == {"200", "503"}
    for path in ("/docs", "/redoc"):
        assert (await exchange(proxy.admin_url, "GET", path)).status == 404
    fake.handler = echo
    for path in ("/openapi.json", "/docs", "/metrics", "/readyz", "/livez", "/health"):
        assert (await exchange(proxy.url, "GET", path)).json()["target"] == path
