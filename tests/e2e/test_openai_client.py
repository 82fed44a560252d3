"""What openai-python makes of it: the client that most of the streams go to."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import openai
import pytest

from tests.captures import Capture, event_streams
from tests.fake_scripts import answer, play, stream, vllm_events
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from openai.types.responses import ResponseStreamEvent

    from tests.conftest import StartLastword
    from tests.fake_vllm import FakeVllm

TRUNCATED = [x for x in event_streams() if x.is_truncated and x.curl_exit == 0]


@asynccontextmanager
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """Give a client that does not retry."""
    async with (
        asyncio.timeout(PATIENCE_S * 2),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client,
    ):
        yield client


async def events_of(
    url: str, received: list[ResponseStreamEvent] | None = None
) -> list[ResponseStreamEvent]:
    """Create a stream and collect its events."""
    received = [] if received is None else received
    async with client(url) as ai:
        async for event in await ai.responses.create(model="tiny", input="moby", stream=True):
            received.append(event)
    return received


@pytest.mark.parametrize("capture", TRUNCATED[::10], ids=lambda capture: capture.id)
async def test_truncated_stream_is_incomplete(
    capture: Capture, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A stream of a real vLLM that hit its limit arrives as ResponseIncompleteEvent."""
    proxy = await lastword()
    fake.script(play(capture))
    *_, last = await events_of(proxy.url)
    assert last.type == "response.incomplete"
    assert last.response.status == "incomplete"
    assert last.response.incomplete_details
    assert last.response.incomplete_details.reason == "max_output_tokens"


async def test_replay_equals_the_direct_stream(fake: FakeVllm, lastword: StartLastword) -> None:
    """retrieve(stream=True) gives the same events as create(stream=True)."""
    proxy = await lastword()
    fake.handler = stream(vllm_events())
    direct = await events_of(proxy.url)
    async with client(proxy.url) as ai:
        replay = [event async for event in await ai.responses.retrieve("resp_1", stream=True)]
    assert replay == direct
    assert [event.sequence_number for event in direct] == list(range(len(direct)))
    assert direct[-1].type == "response.incomplete"


async def test_completed_stream_stays_completed(fake: FakeVllm, lastword: StartLastword) -> None:
    """A stream that was not truncated is what it was."""
    proxy = await lastword()
    fake.script(stream(vllm_events("completed")))
    assert (await events_of(proxy.url))[-1].type == "response.completed"


async def test_lost_stream_yields_the_failure_and_raises(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """Half an answer ends in ResponseFailedEvent and then in an error that nobody overlooks."""
    proxy = await lastword()
    fake.script(stream(vllm_events()[:6], ending="cut"))
    received: list[ResponseStreamEvent] = []
    with pytest.raises(openai.APIConnectionError):
        await events_of(proxy.url, received)
    assert received[-1].type == "response.failed"
    assert received[-1].response.status == "failed"


async def test_errors_are_readable(fake: FakeVllm, lastword: StartLastword) -> None:
    """VLLM's own error and the proxy's reach the caller as the exceptions that it knows."""
    proxy = await lastword()
    body = b'{"error":{"message":"no such model","type":"NotFoundError","param":null,"code":404}}'
    fake.script(answer(404, body=body))
    with pytest.raises(openai.NotFoundError, match="no such model"):
        await events_of(proxy.url)
    await fake.stop_listening()
    await fake.drop_connections()
    with pytest.raises(openai.InternalServerError, match="refused"):
        await events_of(proxy.url)
