"""Observe first, then switch on: what an operator does with a proxy set by its environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.captures import corrected
from tests.e2e.process import lastword_process
from tests.e2e.wire import post_stream
from tests.fake_scripts import answer, stream, vllm_events
from tests.prometheus import total, until_total

if TYPE_CHECKING:
    from tests.fake_vllm import Exchange, FakeVllm

EVENTS = vllm_events()
BODY = b"".join(EVENTS)
CORRECTIONS = "lastword_corrections_total"
EVENT = "the terminal event would be corrected"
NO_COPIES = "no copies of background responses are kept unless correct is on"
DEPLOYED: dict[str, Any] = {
    "by_environment": True,
    "log_format": "json",
    "ready_needs_upstream": True,
    "background": "proxy",
}


async def truncated(exchange: Exchange) -> None:
    """Answer every create with a truncated stream, and /health as vLLM does."""
    health = exchange.request.target == b"/health"
    await (answer(200, body=b"") if health else stream(EVENTS))(exchange)


async def test_observe_then_on(fake: FakeVllm) -> None:
    """Observed bytes are untouched, what would change is told; a restart with ``on`` changes it."""
    fake.handler = truncated
    async with lastword_process(fake.url, correct="observe", **DEPLOYED) as proxy:
        assert (await post_stream(proxy.url)).body == BODY
        await until_total(proxy.admin_url, 1, CORRECTIONS, mode="observe")
        assert await total(proxy.admin_url, CORRECTIONS, mode="on") == 0
        assert await proxy.stop() == 0
    (would,) = [line for line in proxy.log() if line["event"] == EVENT]
    assert would["response_id"] == "resp_1"
    assert (would["says"], would["would_say"]) == ("response.completed", "response.incomplete")
    (request,) = [line for line in proxy.log() if line["event"] == "request"]
    assert (request["mode"], request["corrected"]) == ("observe", True)
    assert [line for line in proxy.log() if line["event"] == NO_COPIES]

    async with lastword_process(fake.url, correct="on", corect="off", **DEPLOYED) as proxy:
        assert (await post_stream(proxy.url)).body == corrected(BODY)
        await until_total(proxy.admin_url, 1, CORRECTIONS, mode="on", to="response.incomplete")
        assert await total(proxy.admin_url, CORRECTIONS) == 1
        assert await proxy.stop() == 0
    assert not [line for line in proxy.log() if line["event"] in (EVENT, NO_COPIES)]
    (request,) = [line for line in proxy.log() if line["event"] == "request"]
    assert (request["mode"], request["corrected"]) == ("on", True)
    (told,) = [line for line in proxy.log() if "no settings" in line["event"]]
    assert told["variables"] == ["LASTWORD_CORECT"]
