"""Several replicas and one Redis: each replays, follows, cancels and deletes any run."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from tests.e2e.background import (
    ALICE,
    BOB,
    MODES,
    api_of,
    asked,
    blocks,
    cancel,
    create,
    creating,
    delete,
    expected,
    following,
    get,
    kind,
    refusal,
    replay,
)
from tests.e2e.wire import post_stream
from tests.fake_responses_api import FakeResponsesApi
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.conftest import Lastword, StartLastword
    from tests.fake_vllm import Exchange, FakeVllm
    from tests.redis_server import RedisServer


JSON = [("content-type", "application/json")]


class StartReplicas(Protocol):
    """Starts proxies that share a store."""

    async def __call__(self, mode: str, count: int = 3, **settings: Any) -> list[Lastword]:
        """Start so many in this mode."""


@pytest.fixture
def replicas(redis_server: RedisServer, lastword: StartLastword) -> StartReplicas:
    """Give a function that starts three proxies which share a store."""
    shared: dict[str, Any] = {
        "store": redis_server.url,
        "redis_prefix": f"{uuid.uuid4().hex}:",
        "owner_secret": "the same for all of us",
    }

    async def start(mode: str, count: int = 3, **settings: Any) -> list[Lastword]:
        return [await lastword(background=mode, **shared, **settings) for _ in range(count)]

    return start


@pytest.mark.parametrize("mode", MODES)
async def test_create_here_follow_there_replay_anywhere(
    mode: str, fake: FakeVllm, replicas: StartReplicas
) -> None:
    """Followers on every replica get the same bytes as they come, from wherever they begin."""
    a, b, c = await replicas(mode)
    api = FakeResponsesApi(fake, gated=True)
    whole = expected("incomplete", deltas=2)
    async with creating(a.url, gated=fake, max_output_tokens=2) as direct:
        api.step("resp_1", 3)
        await direct.read(4)
        async with (
            following(b.url) as first,
            following(b.url, 1) as second,
            following(c.url, 3) as third,
            following(c.url, 7) as ahead,
        ):
            for follower, count in ((first, 4), (second, 2)):
                await follower.read(count)
            assert (await get(b.url)).json()["status"] in {"in_progress", "queued"}
            api.step("resp_1")
            await third.read(1)
            api.step("resp_1", 100)
            for follower, after in ((direct, -1), (first, -1), (second, 1), (third, 3), (ahead, 7)):
                assert await follower.rest() == whole[after + 1 :]
                assert follower.ending == "clean"
    for proxy in (a, b, c):
        got = await replay(proxy.url)
        assert (blocks(got.body), got.ending) == (whole, "clean")
        assert (await get(proxy.url)).json()["status"] == "incomplete"
        late = await replay(proxy.url, 500)
        assert (late.status, late.body, late.ending) == (200, b"", "clean")
    assert len([request for request in fake.requests if request.method == "POST"]) == 1


@pytest.mark.parametrize("mode", MODES)
async def test_cancel_on_another_replica(
    mode: str, fake: FakeVllm, replicas: StartReplicas
) -> None:
    """It ends the run where it is made, its generation, and its followers everywhere."""
    a, b, c = await replicas(mode)
    api = FakeResponsesApi(fake, gated=True)
    async with creating(a.url, gated=fake) as direct, following(b.url) as follower:
        api.step("resp_1", 3)
        await direct.read(4)
        await follower.read(4)
        cancelled = await cancel(c.url)
        assert (cancelled.status, cancelled.json()["status"]) == (200, "cancelled")
        ends = [(await one.rest(), one.ending) for one in (direct, follower)]
    assert ends[0] == ends[1]
    assert kind(ends[0][0][-1]) == ("response.failed", "cancelled", 4)
    await fake.until(lambda: api.runs["resp_1"].aborted)
    for proxy in (a, b, c):
        assert (await cancel(proxy.url)).status == 200
        assert blocks((await replay(proxy.url)).body) == ends[0][0]


async def test_cancel_and_delete_of_what_has_ended(fake: FakeVllm, replicas: StartReplicas) -> None:
    """What one replica says of a copy the others say too, also that it is gone."""
    a, b, c = await replicas("proxy")
    api = FakeResponsesApi(fake, gated=True)
    async with creating(a.url, gated=fake) as direct:
        assert refusal(await delete(b.url))[0] == 400
        api.step("resp_1", 100)
        await direct.rest()
    assert refusal(await cancel(b.url))[::2] == (400, "Cannot cancel a completed response.")
    gone = await delete(c.url)
    assert (gone.status, gone.json()["deleted"]) == (200, True)
    for proxy in (a, b, c):
        for again in (await get(proxy.url), await replay(proxy.url), await delete(proxy.url)):
            assert again.status == 404
    assert len(fake.requests) == 1


async def test_owners_are_the_same_everywhere(fake: FakeVllm, replicas: StartReplicas) -> None:
    """A key that made a response finds it on every replica, another one on none."""
    a, b, _ = await replicas("proxy")
    FakeResponsesApi(fake)
    await create(a.url, ALICE)
    assert blocks((await replay(b.url, None, ALICE)).body) == expected()
    for proxy in (a, b):
        assert (await get(proxy.url, "", BOB)).status == 404
        assert (await cancel(proxy.url, BOB)).status == 404


@pytest.mark.parametrize("mode", MODES)
async def test_one_request_id_on_all_replicas_at_once_runs_once(
    mode: str, fake: FakeVllm, replicas: StartReplicas
) -> None:
    """Exactly one of them asks vLLM; the others follow that run, and refuse another body."""
    proxies = await replicas(mode)
    FakeResponsesApi(fake)
    for number in range(3):
        name = f"mine-{number}"
        body = asked(request_id=name)
        got = await asyncio.gather(*(post_stream(proxy.url, body) for proxy in proxies * 2))
        assert [blocks(one.body) for one in got] == [expected(response_id=name)] * 6
        assert len(fake.requests) == number + 1
    other = [await create(proxy.url, request_id="mine-0", input="else") for proxy in proxies]
    assert [refusal(one)[:2] for one in other] == [(400, "request_id")] * 3


async def test_a_create_that_upstream_refuses_may_be_tried_on_another_replica(
    fake: FakeVllm, replicas: StartReplicas
) -> None:
    """A claim that no response comes of is in nobody's way."""
    a, b, _ = await replicas("upstream")
    api = FakeResponsesApi(fake, store=False)
    assert (await create(a.url, request_id="mine")).status == 400
    api.store = True
    assert blocks((await create(b.url, request_id="mine")).body) == expected(response_id="mine")


async def test_a_replica_that_stops_hands_its_runs_over(
    fake: FakeVllm, replicas: StartReplicas
) -> None:
    """VLLM makes them still: another one takes up their streams at once, and nothing is lost."""
    a, b = await replicas("upstream", 2, shutdown_grace_s=0, lease_s=60)
    api = FakeResponsesApi(fake, gated=True)
    async with creating(a.url, gated=fake) as direct, following(b.url) as follower:
        api.step("resp_1", 3)
        await direct.read(4)
        await follower.read(4)
        await a.gateway.shut_down()  # type: ignore[attr-defined]
        assert (await direct.rest(), direct.ending) == (expected()[:4], "clean")
        api_of(fake).step("resp_1", 100)
        assert (await follower.rest(), follower.ending) == (expected(), "clean")
        resumed = await replay(b.url, 3)
        assert blocks(resumed.body) == expected()[4:]


async def test_a_thousand_followers(
    fake: FakeVllm, replicas: StartReplicas, redis_server: RedisServer
) -> None:
    """All get the same stream, and Redis sees a few connections per replica, not one for each."""
    proxies = await replicas("proxy")
    api = FakeResponsesApi(fake, gated=True, tokens=20)
    whole = b"".join(expected(deltas=20))
    async with creating(proxies[0].url, gated=fake) as direct:
        api.step("resp_1", 5)
        await direct.read(6)

        def following_now() -> int:
            gateways = [proxy.gateway for proxy in proxies]  # type: ignore[attr-defined]
            made = gateways[0].runs._makers.by_key.values()
            remote = [one for g in gateways[1:] for one in g.runs._replicas._remotes.values()]
            return sum(len(feed._live) for feed in (*(maker.run for maker in made), *remote))

        followers: list[asyncio.Task[bytes]] = []
        while len(followers) < 1_000:
            url = proxies[len(followers) // 100 % 3].url
            followers += [asyncio.create_task(read_stream(url)) for _ in range(100)]
            async with asyncio.timeout(PATIENCE_S):
                while following_now() < len(followers) + 1:  # noqa: ASYNC110 -- nobody tells
                    await asyncio.sleep(0.02)
        clients = redis_server.ask("INFO", "clients").decode()
        connected = int(clients.partition("connected_clients:")[2].partition("\r")[0])
        assert connected <= 3 * 10 + 1
        api.step("resp_1", 10)
        await direct.read(16)
        api.step("resp_1", 100)
        async with asyncio.timeout(PATIENCE_S):
            answers = await asyncio.gather(*followers)
        assert b"".join(await direct.rest()) == whole
    assert set(answers) == {whole}


async def read_stream(url: str) -> bytes:
    """Read a whole replay, however long it takes; the end of a chunked body must be there."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = b"GET /v1/responses/resp_1?stream=true HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    writer.write(head)
    await reader.readuntil(b"\r\n\r\n")
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    writer.close()
    await writer.wait_closed()
    return body


async def test_a_create_whose_response_vllm_has_forgotten_is_made_anew(
    fake: FakeVllm, replicas: StartReplicas
) -> None:
    """Its owner was kept here, its id was taken by it, and vLLM has been started again since."""
    proxy, *_ = await replicas("upstream", 1)
    made = b'{"id":"mine","object":"response","status":"queued"}'

    async def forgetful(exchange: Exchange) -> None:
        await exchange.read_body()
        created = exchange.request.method == "POST"
        await exchange.answer(200 if created else 404, JSON, body=made if created else b"{}")

    fake.handler = forgetful
    for _ in range(2):
        answer = await create(proxy.url, ALICE, stream=False, request_id="mine")
        assert (answer.status, answer.body) == (200, made)
    assert [exchange.request.method for exchange in fake.exchanges] == ["POST", "GET", "POST"]
