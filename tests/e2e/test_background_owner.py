"""Whose a background response is, and what a request_id that was used already means."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.e2e.background import (
    ALICE,
    BOB,
    MODES,
    blocks,
    cancel,
    create,
    creating,
    delete,
    expected,
    get,
    refusal,
    replay,
)
from tests.fake_responses_api import FakeResponsesApi
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.e2e.background import Headers
    from tests.fake_vllm import FakeVllm

NOT_FOUND = (404, "response_id", "Response with id 'resp_1' not found.")


async def see_nothing(url: str, headers: Headers) -> None:
    """Whoever does not own it is told what is told of an id that does not exist."""
    for answer in (
        await get(url, "", headers),
        await replay(url, None, headers),
        await replay(url, 2, headers),
        await cancel(url, headers),
        await delete(url, headers),
    ):
        assert refusal(answer) == NOT_FOUND


@pytest.mark.parametrize("mode", MODES)
async def test_a_copy_is_its_owners_alone(
    mode: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Anyone else gets the 404 of an unknown id; upstream, which would tell, is not asked."""
    proxy = await lastword(background=mode)
    api = FakeResponsesApi(fake, gated=True)
    strangers: list[Headers] = [BOB, (), (*ALICE, *BOB), (("authorization", "bearer alice"),)]
    async with creating(proxy.url, ALICE, gated=fake) as creator:
        for stranger in strangers[:2]:
            await see_nothing(proxy.url, stranger)
        api.step("resp_1", 100)
        assert await creator.rest() == expected()
    for stranger in strangers:
        await see_nothing(proxy.url, stranger)
    assert blocks((await replay(proxy.url, None, ALICE)).body) == expected()
    assert (await get(proxy.url, "", ALICE)).json()["status"] == "completed"
    assert (await delete(proxy.url, ALICE)).status == 200
    await see_nothing(proxy.url, BOB)
    assert len(fake.requests) == 1


async def test_a_response_that_vllm_keeps_is_its_owners_too(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """Of one without stream only the owner is kept, and that is enough."""
    proxy = await lastword(background="upstream")
    FakeResponsesApi(fake)
    await create(proxy.url, ALICE, stream=False)
    await see_nothing(proxy.url, BOB)
    assert len(fake.requests) == 1
    assert (await get(proxy.url, "", ALICE)).status == 200
    assert fake.requests[1].values("authorization") == [b"Bearer alice"]


async def test_owner_headers(fake: FakeVllm, lastword: StartLastword) -> None:
    """Behind an authenticating gateway another header says who asks."""
    proxy = await lastword(background="proxy", owner_headers="X-User , x-team")
    FakeResponsesApi(fake)
    await create(proxy.url, (*ALICE, ("X-User", "u"), ("X-Team", "t")))
    for stranger in (
        (*ALICE, ("X-User", "v"), ("X-Team", "t")),
        (*ALICE, ("X-User", "u")),
        (("X-User", "ut"),),
        ALICE,
    ):
        await see_nothing(proxy.url, stranger)
    assert (await get(proxy.url, "", (*BOB, ("x-team", "t"), ("X-USER", "u")))).status == 200


@pytest.mark.parametrize("mode", MODES)
async def test_request_id_again(mode: str, fake: FakeVllm, lastword: StartLastword) -> None:
    """The same body follows the run that exists, also when both come at once; another is 400."""
    proxy = await lastword(background=mode)
    api = FakeResponsesApi(fake, gated=True)
    whole = expected(response_id="mine")
    taken = (400, "request_id")
    async with (
        asyncio.timeout(PATIENCE_S),
        asyncio.TaskGroup() as group,
        creating(proxy.url, ALICE, gated=fake, request_id="mine") as creator,
    ):
        early = [group.create_task(create(proxy.url, ALICE, request_id="mine")) for _ in range(3)]
        assert refusal(await create(proxy.url, ALICE, request_id="mine", top_p=0.5))[:2] == taken
        api.step("mine", 100)
        assert await creator.rest() == whole
    for task in early:
        assert blocks(task.result().body) == whole
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        both = [group.create_task(create(proxy.url, ALICE, request_id="b")) for _ in range(2)]
        await fake.until(lambda: "b" in api.runs)
        other = refusal(await create(proxy.url, ALICE, request_id="b", top_p=0.5))
        assert other[:2] == taken
        assert "the same body" in other[2]
        api.step("b", 100)
    assert both[0].result().body == both[1].result().body
    assert blocks((await create(proxy.url, ALICE, request_id="mine")).body) == whole
    assert refusal(await create(proxy.url, ALICE, request_id="mine", stream=False))[:2] == taken
    assert len(fake.requests) == 2


async def test_request_id_of_another_owner(fake: FakeVllm, lastword: StartLastword) -> None:
    """A copy's key is (owner, id): two owners may choose the same one."""
    proxy = await lastword(background="proxy")
    FakeResponsesApi(fake)
    await create(proxy.url, ALICE, request_id="mine", max_output_tokens=2)
    await create(proxy.url, BOB, request_id="mine")
    kept = [await replay(proxy.url, None, who, response_id="mine") for who in (ALICE, BOB)]
    assert blocks(kept[0].body) == expected("incomplete", deltas=2, response_id="mine")
    assert blocks(kept[1].body) == expected(response_id="mine")


async def test_request_id_while_auto_finds_out(fake: FakeVllm, lastword: StartLastword) -> None:
    """Two at once, and vLLM's store turns out to be off: one run all the same."""
    proxy = await lastword(background="auto")
    FakeResponsesApi(fake, store=False)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(create(proxy.url, request_id="mine")) for _ in range(3)]
    for task in tasks:
        assert blocks(task.result().body) == expected(response_id="mine")
    assert [ask.json().get("background") for ask in fake.requests] == [True, None]


async def test_request_id_again_without_stream(fake: FakeVllm, lastword: StartLastword) -> None:
    """The response as it is now, from the copy or, where vLLM keeps it, from vLLM."""
    for mode in MODES:
        proxy = await lastword(background=mode)
        FakeResponsesApi(fake)
        known = len(fake.requests)
        first = await create(proxy.url, stream=False, request_id="mine")
        assert first.status == 200
        again = await create(proxy.url, stream=False, request_id="mine")
        assert (again.status, again.json()["id"]) == (200, "mine")
        other = await create(proxy.url, stream=False, request_id="mine", top_p=0.5)
        assert refusal(other)[:2] == (400, "request_id")
        methods = [request.method for request in fake.requests[known:]]
        assert methods == (["POST", "GET"] if mode == "upstream" else ["POST"])


async def test_request_id_of_a_deleted_response(fake: FakeVllm, lastword: StartLastword) -> None:
    """What is gone is no run to be followed: it is made again."""
    proxy = await lastword(background="proxy")
    FakeResponsesApi(fake)
    for _ in range(2):
        assert blocks((await create(proxy.url, request_id="a.B_3-")).body)
        assert (await delete(proxy.url, response_id="a.B_3-")).status == 200
    assert len(fake.requests) == 2


async def test_request_ids_that_are_refused(fake: FakeVllm, lastword: StartLastword) -> None:
    """An id stands in paths and keys: only [A-Za-z0-9._-], 1 to 128 of them."""
    proxy = await lastword(background="proxy")
    FakeResponsesApi(fake)
    for wrong in ("", "a/b", "a b", "é", "a\n", "x" * 129, "%2e", "a?b"):
        assert refusal(await create(proxy.url, request_id=wrong))[:2] == (400, "request_id"), wrong
    assert not fake.requests
    assert (await create(proxy.url, request_id="x" * 128)).status == 200
    assert (await create(proxy.url, request_id="a/b", background=False)).status == 200
