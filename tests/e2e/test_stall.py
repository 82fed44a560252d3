"""Who falls silent: an upstream, or a client."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from proxy.gateway.protocol import LastwordProtocol
from tests.e2e.wire import RESPONSES, Answer, connect, exchange
from tests.fake_responses_api import FakeResponsesApi
from tests.fake_scripts import EVENT_STREAM, stream, vllm_events
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import Exchange, FakeVllm

EVENTS = vllm_events()
CREATE = json.dumps({"stream": True, "background": True, "request_id": "r"}).encode()
QUICK = {"background": "upstream", "stall_check_s": 0.05, "upstream_down_s": 0.3}


def last(answer: Answer) -> dict[str, object]:
    """The response object of an answer's last event."""
    name, data = answer.body.rstrip(b"\n").split(b"\n\n")[-1].split(b"\n")
    assert name == b"event: response.failed"
    response: dict[str, object] = json.loads(data.removeprefix(b"data: "))["response"]
    return response


async def test_silent_upstream_of_a_direct_stream(fake: FakeVllm, lastword: StartLastword) -> None:
    """A stuck engine's stream ends after upstream_idle_s, whatever heartbeats say."""
    proxy = await lastword(upstream_idle_s=0.3, heartbeat_s=0.05)
    fake.script(stream(EVENTS[:3], ending="hang"))
    async with connect(proxy.url) as wire:
        await wire.post()
        answer = await wire.answer()
    assert answer.ending == "cut"
    assert b"silent for too long" in answer.body
    assert last(answer)["status"] == "failed"


async def test_silent_upstream_of_any_other_body(fake: FakeVllm, lastword: StartLastword) -> None:
    """A chat stream that falls silent is cut after upstream_idle_s, with nothing added."""
    proxy = await lastword(upstream_idle_s=0.3, heartbeat_s=0)
    fake.script(stream(EVENTS[:3], ending="hang"))
    async with connect(proxy.url) as wire:
        await wire.request("POST", "/v1/chat/completions", [], b"{}")
        answer = await wire.answer()
    assert (answer.body, answer.ending) == (b"".join(EVENTS[:3]), "cut")


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("cancelled", "cancelled", "The response was cancelled."),
        ("forgotten", "failed", "no longer"),
        ("unhealthy", "failed", "down"),
    ],
)
async def test_run_that_vllm_lets_hang(
    fault: str, status: str, message: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A silent run is asked about, and ended by what vLLM says; live stream and replay alike."""
    api = FakeResponsesApi(fake, gated=True)
    proxy = await lastword(**QUICK)
    async with connect(proxy.url) as wire:
        await wire.post(CREATE)
        await fake.until(lambda: "r" in api.runs)
        api.step("r", 3)
        answer = await wire.head()
        for _ in range(3):
            answer.chunks.append(await wire.chunk())
        if fault == "cancelled":  # straight at vLLM, behind the proxy's back
            await exchange(fake.url, "POST", f"{RESPONSES}/r/cancel", body=b"")
        elif fault == "forgotten":
            run = api.runs["r"]
            api.forget()
            run.allowed = 0
        else:
            api.healthy = False
        await wire.body(answer)
    response = last(answer)
    assert answer.ending == "clean"
    assert response["status"] == status
    assert message in json.dumps(response["error"])
    replay = await exchange(proxy.url, "GET", f"{RESPONSES}/r?stream=true")
    assert replay.body == answer.body


async def test_slow_run_is_left_alone(fake: FakeVllm, lastword: StartLastword) -> None:
    """A run that vLLM says is queued goes on, however often it was asked about."""
    api = FakeResponsesApi(fake, gated=True)
    proxy = await lastword(**QUICK)

    def asked() -> int:
        return sum(request.target == b"/health" for request in fake.requests)

    async with connect(proxy.url) as wire:
        await wire.post(CREATE)
        await fake.until(lambda: "r" in api.runs)
        api.step("r", 2)
        await fake.until(lambda: asked() >= 3)
        api.step("r", 100)
        answer = await wire.answer()
    assert answer.ending == "clean"
    assert b"event: response.completed\n" in answer.body


async def test_lost_stream_of_a_run_is_taken_up_again(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """When only the connection breaks, vLLM goes on: the run reads on after the last number."""
    api = FakeResponsesApi(fake, gated=True)
    proxy = await lastword(background="upstream", upstream_down_s=10)
    async with connect(proxy.url) as wire:
        await wire.post(CREATE)
        await fake.until(lambda: "r" in api.runs)
        api.step("r", 4)
        answer = await wire.head()
        for _ in range(4):
            answer.chunks.append(await wire.chunk())
        await fake.drop_connections()
        api.step("r", 100)
        await wire.body(answer)
    whole = b"".join(api.runs["r"].events)
    assert answer.ending == "clean"
    assert answer.body == whole
    assert any(b"starting_after=3" in request.target for request in fake.requests)


async def test_client_that_takes_nothing_is_cut_off(
    fake: FakeVllm, lastword: StartLastword, capsys: pytest.CaptureFixture[str]
) -> None:
    """After write_stall_s a client that reads nothing is gone, and upstream is closed."""
    proxy = await lastword(write_stall_s=0.3)
    gone = asyncio.Event()

    async def flood(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(200, EVENT_STREAM)
        try:
            while True:
                await exchange.send(EVENTS[0] * 50)
        finally:
            gone.set()

    fake.script(flood)
    async with connect(proxy.url, receive_buffer=4096) as wire:
        await wire.post()
        await wire.head()
        async with asyncio.timeout(PATIENCE_S):
            await gone.wait()
    assert "a client was cut off: it took nothing" in capsys.readouterr().out


async def test_client_that_does_not_take_the_rest_of_a_cut_stream_is_cut_off(
    fake: FakeVllm, lastword: StartLastword, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little is left, and though nothing is written any more, after write_stall_s."""
    protocols: list[LastwordProtocol] = []
    made = LastwordProtocol.connection_made

    def connection_made(self: LastwordProtocol, transport: asyncio.Transport) -> None:
        protocols.append(self)
        made(self, transport)

    monkeypatch.setattr(LastwordProtocol, "connection_made", connection_made)
    proxy = await lastword(write_stall_s=0.3)

    async def fill_and_cut(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(200, EVENT_STREAM)
        while not protocols[0].transport.get_write_buffer_size():
            await exchange.send(b": %b\n\n" % (b"x" * 2**13))
            await asyncio.sleep(0.001)  # the proxy's turn
        await exchange.cut()

    fake.script(fill_and_cut)
    async with connect(proxy.url, receive_buffer=4096) as wire:
        await wire.post()
        async with asyncio.timeout(PATIENCE_S):
            while protocols[0] in protocols[0].connections:  # noqa: ASYNC110 - uvicorn's own set
                await asyncio.sleep(0.05)
