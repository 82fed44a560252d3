"""A replica that dies or stands still: another goes on, and every follower sees one stream."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.background import (
    ALICE,
    blocks,
    cancel,
    creating,
    expected,
    following,
    get,
    kind,
    payload,
    replay,
)
from tests.e2e.crash import forked
from tests.fake_responses_api import FakeResponsesApi
from tests.prometheus import until_outcomes, until_total

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import StartLastword
    from tests.fake_vllm import FakeVllm
    from tests.redis_server import RedisServer


LOST = "The proxy that made the response was lost before it was finished."


@pytest.fixture
def shared(redis_server: RedisServer, fake: FakeVllm) -> dict[str, Any]:
    """What the replicas of one test have in common."""
    return {
        "upstream": fake.url,
        "store": redis_server.url,
        "redis_prefix": f"{uuid.uuid4().hex}:",
        "owner_secret": "the same for all of us",
        "lease_s": 1.5,
    }


async def test_killed_in_proxy_mode(
    tmp_path: Path, fake: FakeVllm, lastword: StartLastword, shared: dict[str, Any]
) -> None:
    """Its run dies with it: another ends the copy with ``response.failed``, for all alike."""
    api = FakeResponsesApi(fake, gated=True)
    shared["background"] = "proxy"
    b, c = await lastword(**shared), await lastword(**shared)
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(forked(tmp_path / "a.log", **shared))
        direct = await stack.enter_async_context(creating(a.url, gated=fake))
        api.step("resp_1", 3)
        read = await direct.read(4)
        followers = [
            await stack.enter_async_context(following(url, after))
            for url in (b.url, c.url)
            for after in (-1, 1, 3, 500)
        ]
        await followers[0].read(4)
        await a.kill()
        ends = [await follower.rest() for follower in followers]
    *before, last = ends[0]
    assert before == read == expected()[:4]
    assert kind(last) == ("response.failed", "failed", 4)
    assert payload(last)["response"]["error"]["message"] == LOST
    assert ends == [[*read, last], [*read[2:], last], [last], [last]] * 2
    assert {follower.ending for follower in followers} == {"clean"}
    for proxy in (b, c):
        assert blocks((await replay(proxy.url)).body) == [*read, last]
        assert blocks((await replay(proxy.url, 500)).body) == [last]
        assert (await get(proxy.url)).json() == payload(last)["response"]


async def test_killed_in_upstream_mode(
    tmp_path: Path, fake: FakeVllm, lastword: StartLastword, shared: dict[str, Any]
) -> None:
    """VLLM makes its run on: another takes its stream up, and followers see no gap, no repeat."""
    api = FakeResponsesApi(fake, gated=True, api_key="alice")
    shared["background"] = "upstream"
    b, c = await lastword(**shared), await lastword(**shared)
    whole = expected("incomplete", deltas=2)
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(forked(tmp_path / "a.log", **shared))
        direct = await stack.enter_async_context(
            creating(a.url, ALICE, gated=fake, max_output_tokens=2)
        )
        api.step("resp_1", 3)
        await direct.read(4)
        # Only Alice's key opens vLLM, and only her followers bring it.
        at_b = await stack.enter_async_context(following(b.url, -1, ALICE))
        at_c = await stack.enter_async_context(following(c.url, 2, ALICE))
        await at_b.read(4)
        await at_c.read(1)
        await a.kill()
        api.step("resp_1", 2)
        await at_b.read(6)
        await at_c.read(3)
        api.step("resp_1", 100)
        assert (await at_b.rest(), at_b.ending) == (whole, "clean")
        assert (await at_c.rest(), at_c.ending) == (whole[3:], "clean")
    for proxy in (b, c):
        assert blocks((await replay(proxy.url, None, ALICE)).body) == whole


@pytest.mark.parametrize("mode", ["upstream", "proxy"])
async def test_standing_still_past_its_lease(
    mode: str, tmp_path: Path, fake: FakeVllm, lastword: StartLastword, shared: dict[str, Any]
) -> None:
    """What it appends when it wakes is refused, and its own followers go on with the new copy.

    The run is counted once, by the replica that ends it.
    """
    api = FakeResponsesApi(fake, gated=True)
    shared["background"] = mode
    b = await lastword(**shared)
    async with (
        forked(tmp_path / "a.log", **shared) as a,
        creating(a.url, gated=fake) as direct,
        following(b.url) as follower,
    ):
        api.step("resp_1", 3)
        read = list(await direct.read(4))
        await follower.read(4)
        a.freeze()
        if mode == "proxy":
            whole = await follower.rest()
            assert (whole[:-1], kind(whole[-1])) == (read, ("response.failed", "failed", 4))
        else:  # the new replica asks vLLM for the rest
            await fake.until(lambda: len(fake.requests) == 2)
            api.step("resp_1", 2)
            await follower.read(6)
        a.thaw()
        api.step("resp_1", 100)
        if mode == "upstream":
            whole = await follower.rest()
            assert whole == expected()
        *got, last = await direct.rest()
        assert direct.ending == "clean"
        assert got == expected()[: len(got)]
        assert last == whole[-1]
        if mode == "upstream":
            assert [*got, last] == whole
        for url in (a.url, b.url):
            assert blocks((await replay(url)).body) == whole
        await until_total(a.admin_url, 0, "lastword_active_runs")
        await until_outcomes(a.admin_url)
        await until_outcomes(b.admin_url, **{"stopped" if mode == "proxy" else "completed": 1})
    assert "another replica has taken a run over" in (tmp_path / "a.log").read_text()


async def test_cancelled_while_its_replica_is_dead(
    tmp_path: Path, fake: FakeVllm, lastword: StartLastword, shared: dict[str, Any]
) -> None:
    """Whoever takes the run over ends it as cancelled; the one who asked waits for that."""
    api = FakeResponsesApi(fake, gated=True)
    shared["background"] = "proxy"
    b = await lastword(**shared)
    async with forked(tmp_path / "a.log", **shared) as a, creating(a.url, gated=fake) as direct:
        api.step("resp_1", 3)
        await direct.read(4)
        async with following(b.url) as follower:
            await follower.read(4)
            await a.kill()
            asked = asyncio.create_task(cancel(b.url))
            assert kind((await follower.rest())[-1]) == ("response.failed", "cancelled", 4)
        got = await asked
        assert (got.status, got.json()["status"]) == (200, "cancelled")
    await until_outcomes(b.admin_url, cancelled=1)


async def test_a_copy_that_cannot_be_read_keeps_no_other_waiting(
    tmp_path: Path,
    fake: FakeVllm,
    lastword: StartLastword,
    shared: dict[str, Any],
    redis_server: RedisServer,
) -> None:
    """Of two runs that lost their replica one is spoilt: the other is taken over all the same."""
    api = FakeResponsesApi(fake, gated=True)
    shared["background"] = "proxy"
    b = await lastword(**shared)
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(forked(tmp_path / "a.log", **shared))
        for number in (1, 2):
            direct = await stack.enter_async_context(creating(a.url, gated=fake))
            api.step(f"resp_{number}", 3)
            await direct.read(4)
        follower = await stack.enter_async_context(following(b.url, response_id="resp_2"))
        await follower.read(4)
        copies = f"{shared['redis_prefix']}copy:*:resp_1"
        spoil = "return redis.call('HSET', redis.call('KEYS', ARGV[1])[1], 'meta', '{')"
        assert redis_server.ask("EVAL", spoil, "0", copies) == b":0\r\n"
        await a.kill()
        assert kind((await follower.rest())[-1]) == ("response.failed", "failed", 4)
