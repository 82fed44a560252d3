"""Redis is down, silent, read-only or out of memory: what is live goes on, nothing is half kept."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from proxy.errors import SettingsError
from proxy.store import redis as redis_store
from proxy.store import redis_link, redis_tail
from tests.e2e.background import (
    blocks,
    create,
    creating,
    delete,
    expected,
    following,
    get,
    metric,
    replay,
)
from tests.e2e.wire import exchange
from tests.fake_responses_api import FakeResponsesApi
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from tests.conftest import Lastword, StartLastword
    from tests.fake_vllm import FakeVllm
    from tests.redis_server import Kind


WHOLE = expected()


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """Give a server that is this test's alone, and clients that wait less long for it."""
    kind: Kind = getattr(request, "param", "redis")
    with pytest.MonkeyPatch.context() as patch, RedisServer(kind, tmp_path) as server:
        patch.setattr(redis_link, "ANSWER_S", 1.0)
        yield server


@pytest.fixture
def settings(server: RedisServer) -> dict[str, Any]:
    """Give what both replicas are started with."""
    return {
        "background": "proxy",
        "store": server.url,
        "owner_secret": "the same for all of us",
        "lease_s": 5,
    }


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what only a request can tell."""
    async with asyncio.timeout(2 * PATIENCE_S):
        while not await look():  # noqa: ASYNC110 -- nobody tells
            await asyncio.sleep(0.02)


async def is_up(proxy: Lastword) -> bool:
    """Whether the proxy says that the store is there."""
    return await metric(proxy.admin_url, "lastword_store_up") == 1


async def assert_away(proxy: Lastword) -> None:
    """What needs the store is 503 with a sentence; the proxy is ready all the same."""
    for answer in await asyncio.gather(
        get(proxy.url, response_id="other"),
        replay(proxy.url, response_id="other"),
        delete(proxy.url, response_id="other"),
        create(proxy.url),
        create(proxy.url, request_id="mine"),
    ):
        assert answer.status == 503
        assert "store of background responses does not answer" in answer.json()["error"]["message"]
    assert (await exchange(proxy.admin_url, "GET", "/readyz")).status == 200
    assert not await is_up(proxy)


async def test_down_and_back_empty(
    server: RedisServer, settings: dict[str, Any], fake: FakeVllm, lastword: StartLastword
) -> None:
    """The live stream goes on to its end; the copy is dropped whole; all works again at once."""
    a, b = await lastword(**settings), await lastword(**settings)
    api = FakeResponsesApi(fake, gated=True)
    async with creating(a.url, gated=fake) as direct, following(b.url) as follower:
        api.step("resp_1", 3)
        await direct.read(4)
        await follower.read(4)
        server.kill()
        api.step("resp_1", 2)
        await direct.read(6)
        for proxy in (a, b):
            await assert_away(proxy)
        assert len(fake.requests) == 1  # no run is begun that cannot be kept
        server.start()
        api.step("resp_1", 100)
        assert (await direct.rest(), direct.ending) == (WHOLE, "clean")
        assert (await follower.rest(), follower.ending) == (WHOLE[:4], "cut")
    await until(lambda: is_up(a))
    await until(lambda: is_up(b))
    assert await metric(a.admin_url, "lastword_dropped_copies_total") == 1
    assert (await get(b.url)).status == 200  # vLLM's word: nobody here has ever heard of it
    api.gated = False
    assert blocks((await create(a.url)).body) == expected(response_id="resp_2")
    got = await replay(b.url, response_id="resp_2")
    assert blocks(got.body) == expected(response_id="resp_2")


async def test_silent_for_a_while(
    server: RedisServer, settings: dict[str, Any], fake: FakeVllm, lastword: StartLastword
) -> None:
    """If it comes back with all it had, the copy goes on without a gap, for followers too."""
    a, b = await lastword(**settings), await lastword(**settings)
    api = FakeResponsesApi(fake, gated=True)
    async with creating(a.url, gated=fake) as direct, following(b.url) as follower:
        api.step("resp_1", 3)
        await direct.read(4)
        await follower.read(4)
        server.freeze()
        api.step("resp_1", 3)
        await direct.read(7)
        await assert_away(a)
        server.thaw()
        api.step("resp_1", 100)
        for one in (direct, follower):
            assert (await one.rest(), one.ending) == (WHOLE, "clean")
    for proxy in (a, b):
        assert blocks((await replay(proxy.url)).body) == WHOLE
    assert await metric(a.admin_url, "lastword_dropped_copies_total") == 0


TROUBLES = {
    "out of memory": ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    "read-only": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    # Redis 6.2 takes writes of scripts all the same.
    "too few replicas": (
        "CONFIG SET min-replicas-to-write 1",
        "CONFIG SET min-replicas-to-write 0",
    ),
}


@pytest.mark.parametrize(
    ("server", "trouble"),
    [
        ("redis", "out of memory"),
        ("valkey", "out of memory"),
        ("redis", "read-only"),
        ("valkey", "read-only"),
        ("valkey", "too few replicas"),
    ],
    indirect=["server"],
)
async def test_takes_no_writes(
    server: RedisServer,
    trouble: str,
    settings: dict[str, Any],
    fake: FakeVllm,
    lastword: StartLastword,
) -> None:
    """It answers, but keeps nothing: no run is begun, and those that run are kept when it does.

    That it answers reads does not make it a store that is there.
    """
    begin, cure = TROUBLES[trouble]
    a, b = await lastword(**settings), await lastword(**settings)
    api = FakeResponsesApi(fake, gated=True)
    async with creating(a.url, gated=fake) as direct:
        api.step("resp_1", 3)
        await direct.read(4)
        assert server.ask(*begin.split()).startswith(b"+OK")
        api.step("resp_1", 3)
        await direct.read(7)
        api.gated = False
        refused = await create(b.url)
        assert refused.status == 503
        assert "store of background responses does not answer" in refused.body.decode()
        assert (await get(b.url, response_id="other")).status == 404
        assert not await is_up(b)
        assert server.ask(*cure.split()).startswith(b"+OK")
        api.gated = True
        api.step("resp_1", 100)
        assert (await direct.rest(), direct.ending) == (WHOLE, "clean")
    assert blocks((await replay(b.url)).body) == WHOLE
    assert await metric(a.admin_url, "lastword_dropped_copies_total") == 0


async def test_a_run_that_cannot_be_kept_ends_at_vllm_too(
    server: RedisServer, settings: dict[str, Any], fake: FakeVllm, lastword: StartLastword
) -> None:
    """VLLM would make it on for nobody: it is cancelled there, and the client told of 503."""
    proxy = await lastword(**settings | {"background": "upstream"})
    api = FakeResponsesApi(fake, gated=True)
    assert server.ask(*TROUBLES["out of memory"][0].split()).startswith(b"+OK")
    creating_it = asyncio.create_task(create(proxy.url))
    await fake.until(lambda: bool(api.runs))
    api.step("resp_1")
    assert (await creating_it).status == 503
    await fake.until(lambda: any(one.target.endswith(b"/cancel") for one in fake.requests))


async def test_away_for_too_long(
    server: RedisServer,
    settings: dict[str, Any],
    fake: FakeVllm,
    lastword: StartLastword,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits for it has an end: the copy is dropped whole as soon as it is back."""
    monkeypatch.setattr(redis_store, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(redis_tail, "_BLOCK_S", 0.3)
    a = await lastword(**settings | {"lease_s": 3})
    b = await lastword(**settings | {"lease_s": 3})
    api = FakeResponsesApi(fake, gated=True)
    async with creating(a.url, gated=fake) as direct, following(b.url) as follower:
        api.step("resp_1", 3)
        await direct.read(4)
        await follower.read(4)
        server.freeze()
        api.step("resp_1", 3)
        await direct.read(7)
        # No false end: whoever followed here may resume with its cursor.
        assert (await follower.rest(), follower.ending) == (WHOLE[:4], "clean")

        async def dropped() -> bool:
            return await metric(a.admin_url, "lastword_dropped_copies_total") == 1

        await until(dropped)
        server.thaw()
        api.step("resp_1", 100)
        assert (await direct.rest(), direct.ending) == (WHOLE, "clean")

    async def gone() -> bool:
        return (await replay(b.url)).status == 400

    await until(gone)
    assert "dropped" in (await replay(b.url)).json()["error"]["message"]


async def test_started_while_it_is_away(
    server: RedisServer, settings: dict[str, Any], fake: FakeVllm, lastword: StartLastword
) -> None:
    """A proxy starts without it, is ready, and keeps copies as soon as it comes."""
    server.kill()
    a = await lastword(**settings)
    FakeResponsesApi(fake)
    await assert_away(a)
    server.start()

    async def created() -> bool:
        return (await create(a.url, request_id="mine")).status == 200

    await until(created)
    assert blocks((await replay(a.url, response_id="mine")).body) == expected(response_id="mine")


async def test_servers_that_will_not_do(
    tmp_path: Path, settings: dict[str, Any], fake: FakeVllm, lastword: StartLastword
) -> None:
    """A cluster or a wrong password is refused at start, in a sentence without the password."""
    with (
        RedisServer("redis", tmp_path, "--cluster-enabled", "yes") as cluster,
        pytest.raises(SettingsError, match="part of a cluster"),
    ):
        await lastword(**settings | {"store": cluster.url})
    with RedisServer("valkey", tmp_path, "--requirepass", "right") as guarded:
        wrong, right = (guarded.url.replace("//", f"//:{word}@") for word in ("secret", "right"))
        for url in (guarded.url, wrong):
            with pytest.raises(SettingsError, match="The Redis server refuses") as refused:
                await lastword(**settings | {"store": url})
            assert "secret" not in str(refused.value)
        a = await lastword(**settings | {"store": right})
        FakeResponsesApi(fake)
        assert blocks((await create(a.url)).body) == WHOLE
        assert blocks((await replay(a.url)).body) == WHOLE
        assert (await delete(a.url)).status == 200
