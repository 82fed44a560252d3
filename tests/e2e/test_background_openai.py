"""Background responses as openai-python uses them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import openai
import pytest

from tests.e2e.background import MODES
from tests.fake_responses_api import FakeResponsesApi
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.conftest import StartLastword
    from tests.fake_vllm import FakeVllm


@asynccontextmanager
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """Give a client that does not retry."""
    async with (
        asyncio.timeout(PATIENCE_S),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("mode", MODES)
async def test_create_and_retrieve(mode: str, fake: FakeVllm, lastword: StartLastword) -> None:
    """The scenario of the upstream fix: the replay equals the stream, and ends incomplete."""
    proxy = await lastword(background=mode)
    FakeResponsesApi(fake)
    async with client(proxy.url) as ai:
        created = await ai.responses.create(
            model="tiny", input="moby", background=True, stream=True, max_output_tokens=2
        )
        events = [event async for event in created]
        again = [event async for event in await ai.responses.retrieve("resp_1", stream=True)]
        assert again == events
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.incomplete"
        rest = await ai.responses.retrieve("resp_1", stream=True, starting_after=4)
        assert [event async for event in rest] == events[5:]
        assert (await ai.responses.retrieve("resp_1")).status == "incomplete"
        with pytest.raises(openai.BadRequestError, match="Cannot cancel an incomplete response"):
            await ai.responses.cancel("resp_1")
        await ai.responses.delete("resp_1")
        with pytest.raises(openai.NotFoundError, match="not found"):
            await ai.responses.retrieve("resp_1")


async def test_resume_helper(fake: FakeVllm, lastword: StartLastword) -> None:
    """``stream(response_id=…, starting_after=…)`` replays from 0 and skips by itself."""
    proxy = await lastword(background="proxy")
    FakeResponsesApi(fake)
    async with client(proxy.url) as ai:
        created = await ai.responses.create(
            model="tiny", input="moby", background=True, stream=True
        )
        events = [event async for event in created]
        async with ai.responses.stream(response_id="resp_1", starting_after=4) as resumed:
            got = [event async for event in resumed]
            final = await resumed.get_final_response()
    assert [event.sequence_number for event in got] == list(range(5, len(events)))
    assert [event.type for event in got] == [event.type for event in events[5:]]
    assert final.output_text == "word0 word1 word2 "


@pytest.mark.parametrize("mode", MODES)
async def test_cancel(mode: str, fake: FakeVllm, lastword: StartLastword) -> None:
    """Cancelled in the middle, the live stream and the replay end at once."""
    proxy = await lastword(background=mode)
    api = FakeResponsesApi(fake, gated=True)
    async with client(proxy.url) as ai, asyncio.TaskGroup() as group:
        creating = group.create_task(
            ai.responses.create(model="tiny", input="moby", background=True, stream=True)
        )
        await fake.until(lambda: "resp_1" in api.runs)
        api.step("resp_1", 3)
        stream = await creating
        events = [await anext(stream) for _ in range(3)]
        cancelled = await ai.responses.cancel("resp_1")
        assert cancelled.status == "cancelled"
        events += [event async for event in stream]
        assert [event.type for event in events][-1] == "response.failed"
        again = [event async for event in await ai.responses.retrieve("resp_1", stream=True)]
        assert again == events
        assert (await ai.responses.cancel("resp_1")).status == "cancelled"
        assert (await ai.responses.retrieve("resp_1")).status == "cancelled"


async def test_polling(fake: FakeVllm, lastword: StartLastword) -> None:
    """Created without stream, the response is asked for until it has ended."""
    for mode in MODES:
        proxy = await lastword(background=mode)
        FakeResponsesApi(fake)
        async with client(proxy.url) as ai:
            response = await ai.responses.create(model="tiny", input="moby", background=True)
            while response.status in {"queued", "in_progress"}:
                response = await ai.responses.retrieve(response.id)
            assert (response.status, response.background) == ("completed", True)
            assert response.output_text == "word0 word1 word2 "
