"""Cancel and DELETE of a background response, and what its followers see of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.e2e.background import (
    MODES,
    cancel,
    create,
    creating,
    delete,
    expected,
    following,
    get,
    kind,
    payload,
    refusal,
    replay,
)
from tests.e2e.wire import RESPONSES, exchange
from tests.fake_responses_api import FakeResponsesApi
from tests.fake_scripts import stream

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import StartLastword
    from tests.fake_vllm import Exchange, FakeVllm


@pytest.mark.parametrize("mode", MODES)
async def test_cancel_ends_the_run_and_every_follower(
    mode: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Everyone gets ``response.failed`` with the status cancelled, and vLLM stops generating."""
    proxy = await lastword(background=mode)
    api = FakeResponsesApi(fake, gated=True)
    async with (
        creating(proxy.url, gated=fake) as creator,
        following(proxy.url) as follower,
        following(proxy.url, 100) as ahead,
    ):
        api.step("resp_1", 3)
        await creator.read(4)
        await follower.read(4)
        answers = await asyncio.gather(*(cancel(proxy.url) for _ in range(3)))
        cancelled = answers[0].json()
        assert [(x.status, x.json()) for x in answers] == [(200, cancelled)] * 3
        assert (cancelled["status"], cancelled["background"]) == ("cancelled", True)
        assert cancelled["error"] == {
            "code": "cancelled",
            "message": "The response was cancelled.",
        }
        for one in (creator, follower):
            *before, last = await one.rest()
            assert (before, one.ending) == (expected()[:4], "clean")
            assert kind(last) == ("response.failed", "cancelled", 4)
            assert payload(last)["response"] == cancelled
        await ahead.rest()
        assert ahead.ending == "clean"
    await fake.until(lambda: api.runs["resp_1"].aborted)
    await (await fake.exchange()).until_closed()
    seen = [request.target for request in fake.requests[1:]]
    assert set(seen) == ({b"/v1/responses/resp_1/cancel"} if mode == "upstream" else set())
    assert (await replay(proxy.url)).body == creator.data
    assert (await replay(proxy.url, 3)).body == last
    assert (await get(proxy.url)).json() == cancelled
    known = len(fake.requests)
    again = await cancel(proxy.url)
    assert (again.status, again.json()) == (200, cancelled)
    assert len(fake.requests) == known


@pytest.mark.parametrize("mode", MODES)
async def test_cancel_with_a_body(mode: str, fake: FakeVllm, lastword: StartLastword) -> None:
    """Some clients send one: it says nothing, and must not break the request that goes up."""
    proxy = await lastword(background=mode)
    api = FakeResponsesApi(fake, gated=True)
    target = RESPONSES + "/resp_1/cancel"
    async with creating(proxy.url, gated=fake) as creator:
        got = await exchange(proxy.url, "POST", target, [("Content-Type", "text/plain")], b"{}")
        assert (got.status, got.json()["status"]) == (200, "cancelled")
        await creator.rest()
    await fake.until(lambda: api.runs["resp_1"].aborted)


async def test_cancel_of_what_cannot_be_cancelled(fake: FakeVllm, lastword: StartLastword) -> None:
    """Finished: 400 with its status.  Unknown and foreground ones are vLLM's to answer."""
    proxy = await lastword(background="upstream")
    FakeResponsesApi(fake)
    await create(proxy.url)
    await create(proxy.url, max_output_tokens=2)
    await create(proxy.url, background=False)
    for number, (known, message) in enumerate(
        [
            (True, "Cannot cancel a completed response."),
            (True, "Cannot cancel an incomplete response."),
            (False, "Cannot cancel a synchronous response."),
        ],
        1,
    ):
        before = len(fake.requests)
        got = refusal(await cancel(proxy.url, response_id=f"resp_{number}"))
        assert got == (400, "response_id", message)
        assert (len(fake.requests) == before) is known
    unknown = refusal(await cancel(proxy.url, response_id="resp_77"))
    assert unknown == (404, "response_id", "Response with id 'resp_77' not found.")


async def test_cancel_while_the_stream_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A vLLM that accepts and never answers does not keep a cancelled run's followers."""
    monkeypatch.setattr("proxy.background.maker.RETRY_PAUSE_S", 0.01)
    proxy = await lastword(background="upstream")
    events = expected()
    fake.script(stream(events[:3], ending="cut"), _never, _cancelled)
    async with creating(proxy.url) as creator:
        await creator.read(3)
        asked_again = await fake.exchange(1)
        assert (await cancel(proxy.url)).json()["status"] == "cancelled"
        assert kind((await creator.rest())[-1]) == ("response.failed", "cancelled", 3)
        await asked_again.until_closed()


async def test_cancel_that_vllm_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Who cancels is answered all the same, and so are the followers: the copy ends here."""
    monkeypatch.setattr("proxy.background.vllm_responses.CANCEL_WAIT_S", 0.1)
    proxy = await lastword(background="upstream")
    fake.script(stream(expected()[:3], ending="hang"), _never)
    async with creating(proxy.url) as creator:
        await creator.read(3)
        assert (await cancel(proxy.url)).json()["status"] == "cancelled"
        assert kind((await creator.rest())[-1]) == ("response.failed", "cancelled", 3)
    await fake.exchanges[1].until_closed()


async def _never(exchange: Exchange) -> None:
    await exchange.wait_closed()


async def _cancelled(exchange: Exchange) -> None:
    await exchange.answer(200, (), b"{}")


@pytest.mark.parametrize("mode", MODES)
async def test_delete(mode: str, fake: FakeVllm, lastword: StartLastword) -> None:
    """In flight: 400.  Then it is gone for good, although vLLM still has the id."""
    proxy = await lastword(background=mode)
    api = FakeResponsesApi(fake, gated=True)
    async with creating(proxy.url, gated=fake) as creator:
        status, _, message = refusal(await delete(proxy.url))
        assert (status, "in progress" in message) == (400, True)
        api.step("resp_1", 100)
        assert await creator.rest() == expected()
    known = len(fake.requests)
    gone = await delete(proxy.url)
    assert gone.json() == {"id": "resp_1", "object": "response", "deleted": True}
    not_found = (404, "response_id", "Response with id 'resp_1' not found.")
    for answer in (
        await get(proxy.url),
        await replay(proxy.url),
        await replay(proxy.url, 2),
        await cancel(proxy.url),
        await delete(proxy.url),
    ):
        assert refusal(answer) == not_found
    assert len(fake.requests) == known
    assert (await get(fake.url)).status == 200


async def test_delete_at_once_after_the_end(
    tmp_path: Path, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Who has seen the stream's end may delete it, however busy the disk is."""
    proxy = await lastword(background="proxy", store=f"sqlite:{tmp_path / 'copies.db'}")
    FakeResponsesApi(fake)
    for number in range(1, 9):
        await create(proxy.url)
        assert (await delete(proxy.url, response_id=f"resp_{number}")).status == 200


async def test_delete_of_a_response_that_vllm_keeps(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """Of one without stream only the owner was kept: deleted here, it stays 404."""
    proxy = await lastword(background="upstream")
    FakeResponsesApi(fake)
    await create(proxy.url, stream=False)
    assert (await get(proxy.url)).status == 200
    assert (await delete(proxy.url)).json()["deleted"] is True
    known = len(fake.requests)
    assert (await get(proxy.url)).status == 404
    assert len(fake.requests) == known


async def test_response_that_vllm_keeps_is_cancelled_and_deleted_by_the_same_rules(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """In flight it can't be deleted; cancelled twice is 200; what has ended can't be cancelled."""
    proxy = await lastword(background="upstream")
    api = FakeResponsesApi(fake, gated=True)
    await create(proxy.url, stream=False)
    assert refusal(await delete(proxy.url))[:2] == (400, "response_id")
    cancels = [await cancel(proxy.url) for _ in range(2)]
    assert [(x.status, x.json()["status"]) for x in cancels] == [(200, "cancelled")] * 2
    assert (await delete(proxy.url)).json()["deleted"] is True

    await create(proxy.url, stream=False)
    api.step("resp_2", 100)
    await fake.until(lambda: api.runs["resp_2"].ended)
    answer = await cancel(proxy.url, response_id="resp_2")
    assert refusal(answer) == (400, "response_id", "Cannot cancel a completed response.")
