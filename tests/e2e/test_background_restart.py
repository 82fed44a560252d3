"""A proxy that was killed and started again: every copy is a true prefix plus a proper end."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import signal
import sqlite3
from contextlib import AsyncExitStack, closing
from typing import TYPE_CHECKING, Literal, cast

import msgspec

from proxy.background.meta import Meta
from proxy.background.owner import Owners
from proxy.store import Block, CopyKey
from proxy.store.opening import open_store, owner_secret
from tests.e2e.background import (
    ALICE,
    BOB,
    asked,
    blocks,
    cancel,
    create,
    creating,
    expected,
    following,
    get,
    kind,
    payload,
    refusal,
    replay,
)
from tests.e2e.crash import killed_fork
from tests.e2e.process import lastword_process
from tests.e2e.wire import RESPONSES, post_stream
from tests.fake_responses_api import FakeResponsesApi
from tests.fake_scripts import response_object
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from proxy.gateway.server import Running
    from tests.conftest import StartLastword
    from tests.e2e.background import Headers
    from tests.fake_vllm import FakeVllm

RESTARTED = "The proxy was restarted before the response was finished."


async def leave_open(
    url: str,
    mode: Literal["upstream", "proxy", "object"],
    response_id: str,
    events: list[bytes],
    headers: Headers = (),
) -> None:
    """Leave in a store what a proxy leaves there that is killed after so many events."""
    store = open_store(url)
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers]
    owner = Owners([b"authorization"], owner_secret(url)).owner_of(pairs)
    key = CopyKey(owner, response_id)
    meta = Meta(mode, hashlib.sha256(asked()).hexdigest(), RESPONSES)
    responses = [payload(x)["response"] for x in events if b'"response"' in x]
    shown = responses[-1] if responses else response_object("in_progress", response_id)
    snapshot = json.dumps(shown | {"background": True}).encode()
    await store.create(key, meta=msgspec.json.encode(meta), snapshot=snapshot)
    if events:
        await store.append(key, 0, [Block(n, block) for n, block in enumerate(events)])
    await store.aclose()


async def test_proxy_mode_ends_what_was_open(
    tmp_path: Path, fake: FakeVllm, lastword: StartLastword, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its runs die with it: ``response.failed`` says that it was restarted, nobody waits."""
    store = f"sqlite:{tmp_path / 'copies.db'}"
    FakeResponsesApi(fake)
    whole = {f"cut_{n}": expected(response_id=f"cut_{n}") for n in range(len(expected()))}
    for number, (response_id, events) in enumerate(whole.items()):
        await leave_open(store, "proxy", response_id, events[:number])
    await leave_open(store, "proxy", "whole", expected("incomplete", response_id="whole"))
    await leave_open(store, "proxy", "done", [*expected(response_id="done"), b"data: [DONE]\n\n"])
    await leave_open(store, "object", "object", [])
    proxy = await lastword(background="proxy", store=store)
    for number, (response_id, events) in enumerate(whole.items()):
        got = await replay(proxy.url, response_id=response_id)
        *before, last = blocks(got.body)
        assert (before, got.ending) == (events[:number], "clean")
        assert kind(last) == ("response.failed", "failed", number)
        # A cursor from before the crash may be ahead of what it has left; nobody is left waiting.
        for after in (number - 1, number, number + 5):
            late = await replay(proxy.url, after, response_id=response_id)
            assert (late.body, late.ending) == (last, "clean")
        shown = (await get(proxy.url, response_id=response_id)).json()
        assert shown == payload(last)["response"]
        assert shown["error"] == {"code": "server_error", "message": RESTARTED}
    got = await replay(proxy.url, 3, response_id="whole")
    assert blocks(got.body) == expected("incomplete", response_id="whole")[4:]
    assert (await get(proxy.url, response_id="whole")).json()["status"] == "incomplete"
    got = await replay(proxy.url, response_id="done")
    assert got.body == b"".join(expected(response_id="done")) + b"data: [DONE]\n\n"
    assert not fake.requests
    runs = cast("Running", proxy).gateway.runs
    assert runs is not None
    assert not await runs.store.open_copies()
    assert refusal(await replay(proxy.url, response_id="object"))[:2] == (400, "stream")
    assert (await get(proxy.url, response_id="object")).status == 404  # vLLM's word
    assert len(fake.requests) == 1
    assert "runs of an earlier process are taken up or ended" in capsys.readouterr().out


async def test_upstream_mode_completes_what_was_open(
    tmp_path: Path, fake: FakeVllm, lastword: StartLastword
) -> None:
    """VLLM has gone on: its stream is taken up after the last stored number."""
    store = f"sqlite:{tmp_path / 'copies.db'}"
    FakeResponsesApi(fake)
    limit = {"max_output_tokens": 2}
    length = len(expected("incomplete", deltas=2))
    for number in range(length + 1):
        response_id = f"run_{number}"
        await post_stream(fake.url, asked(request_id=response_id, **limit))
        events = expected("incomplete", deltas=2, response_id=response_id)
        await leave_open(store, "upstream", response_id, events[:number])
    known = len(fake.requests)
    proxy = await lastword(background="upstream", store=store)
    for number in range(length + 1):
        response_id = f"run_{number}"
        whole = expected("incomplete", deltas=2, response_id=response_id)
        for after in (number, number - 1, 0, None, length, 10**20):  # the first may still be ahead
            got = await replay(proxy.url, after, response_id=response_id)
            assert blocks(got.body) == whole[0 if after is None else after + 1 :], (number, after)
            assert got.ending == "clean"
        shown = (await get(proxy.url, response_id=response_id)).json()
        assert shown["status"] == "incomplete"
    cursors = [b"&starting_after=%d" % (n - 1) if n else b"" for n in range(length)]
    wanted = {
        b"/v1/responses/run_%d?stream=true%b" % (number, cursor)
        for number, cursor in enumerate(cursors)
    }
    assert {request.target for request in fake.requests[known:]} == wanted
    assert all(request.values("host") for request in fake.requests[known:])


async def test_followers_of_a_run_that_is_taken_up(
    tmp_path: Path, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Whoever comes back sees no gap and no repeat, wherever its cursor stands."""
    store = f"sqlite:{tmp_path / 'copies.db'}"
    api = FakeResponsesApi(fake, gated=True)
    whole = expected()
    async with AsyncExitStack() as stack:
        async with creating(fake.url, gated=fake) as direct:
            api.step("resp_1", 5)
            await direct.read(6)
        await leave_open(store, "upstream", "resp_1", whole[:4])
        proxy = await lastword(background="upstream", store=store)
        followers = [
            (after, await stack.enter_async_context(following(proxy.url, after)))
            for after in range(-1, len(whole))
        ]
        for after, follower in followers[:5]:
            await follower.read(5 - after)
        assert (await get(proxy.url)).json()["status"] == "in_progress"
        api.step("resp_1", 100)
        for after, follower in followers:
            assert await follower.rest() == whole[after + 1 :], after
            assert follower.ending == "clean"
    assert blocks((await replay(proxy.url)).body) == whole


async def test_run_whose_key_only_its_owner_has(
    tmp_path: Path, fake: FakeVllm, lastword: StartLastword
) -> None:
    """With an API key at vLLM, the copy is completed when its owner comes back."""
    store = f"sqlite:{tmp_path / 'copies.db'}"
    api = FakeResponsesApi(fake, gated=True, api_key="alice")
    for response_id in ("back", "cancelled"):
        async with creating(fake.url, ALICE, gated=fake, request_id=response_id) as direct:
            api.step(response_id, 4)
            await direct.read(5)
        events = expected(response_id=response_id)
        await leave_open(store, "upstream", response_id, events[:3], ALICE)
    known = len(fake.requests)
    proxy = await lastword(background="upstream", store=store)
    for place in (known, known + 1):
        refused = await fake.exchange(place)
        await refused.until_finished()
        assert refused.request.values("authorization") == []
    whole = expected(response_id="back")
    assert (await replay(proxy.url, None, BOB, response_id="back")).status == 404
    async with following(proxy.url, 1, ALICE, response_id="back") as follower:
        assert await follower.read(3) == whole[2:5]
        api.step("back", 100)
        assert await follower.rest() == whole[2:]
    assert blocks((await replay(proxy.url, None, ALICE, response_id="back")).body) == whole
    got = await cancel(proxy.url, ALICE, response_id="cancelled")
    assert (got.status, got.json()["status"]) == (200, "cancelled")
    assert api.runs["cancelled"].aborted
    last = blocks((await replay(proxy.url, None, ALICE, response_id="cancelled")).body)[-1]
    assert kind(last)[:2] == ("response.failed", "cancelled")


async def stored(path: Path, response_id: str) -> None:
    """Wait until a copy is in the file: a crash before that leaves nothing to take up."""
    query = "SELECT count(*) FROM copies WHERE response_id = ?"
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
                if connection.execute(query, (response_id,)).fetchone()[0]:
                    return
            await asyncio.sleep(0.01)


async def test_killed_as_its_users_start_it(tmp_path: Path, fake: FakeVllm) -> None:
    """``python -m proxy serve`` killed in mid-stream and started again, in both modes."""
    api = FakeResponsesApi(fake, gated=True)
    store = f"sqlite:{tmp_path / 'copies.db'}"
    whole = expected(response_id="up")
    async with (
        lastword_process(fake.url, background="upstream", store=store) as proxy,
        creating(proxy.url, gated=fake, request_id="up") as follower,
    ):
        api.step("up", 3)
        assert await follower.read(4) == whole[:4]
        await stored(tmp_path / "copies.db", "up")
        await proxy.stop(signal.SIGKILL)
    api.step("up", 100)
    async with lastword_process(fake.url, background="proxy", store=store) as proxy:
        url = proxy.url
        assert blocks((await replay(url, 3, response_id="up")).body) == whole[4:]
        assert blocks((await replay(url, response_id="up")).body) == whole
        assert (await create(url, stream=False, request_id="up")).status == 400


async def test_killed_twenty_times(tmp_path: Path, fake: FakeVllm) -> None:
    """Whenever it is killed, a copy holds what vLLM sent, in order, and a proper end."""
    api = FakeResponsesApi(fake, gated=True, tokens=60)
    common = {"upstream": fake.url, "store": f"sqlite:{tmp_path / 'copies.db'}"}
    chance = random.Random(11)
    seen: dict[str, tuple[str, list[bytes]]] = {}
    for number in range(21):
        mode = ("upstream", "proxy")[number % 2]
        log = tmp_path / f"{number}.log"
        async with killed_fork(log, background=mode, **common) as url:
            if number:
                response_id = f"run_{number - 1}"
                await check(url, response_id, *seen[response_id])
            if number == 20:
                break
            response_id = f"run_{number}"
            async with creating(url, gated=fake, request_id=response_id) as follower:
                made = chance.randrange(1, 60)
                api.step(response_id, made)
                read = list(await follower.read(chance.randrange(1, made + 1)))
                seen[response_id] = mode, read
        api.step(response_id, 100)
    async with killed_fork(tmp_path / "last.log", background="proxy", **common) as url:
        for response_id, told in seen.items():
            await check(url, response_id, *told)


async def check(url: str, response_id: str, mode: str, read: list[bytes]) -> None:
    """Check a copy and what its follower gets that had read so much of it."""
    whole = expected(response_id=response_id, deltas=60)
    assert read == whole[: len(read)]
    rest = blocks((await replay(url, len(read) - 1, response_id=response_id)).body)
    got = await replay(url, response_id=response_id)
    if mode == "upstream":
        assert blocks(got.body) == whole
        assert read + rest == whole
        return
    if got.ending == "cut":
        assert not got.body  # nothing was stored in time: this is vLLM's word, who knows no run
        return
    *before, last = blocks(got.body)
    assert before == whole[: len(before)]
    assert kind(last) == ("response.failed", "failed", len(before))
    assert payload(last)["response"]["error"]["message"] == RESTARTED
    # Who has read more than the crash has left gets the ending alone: nobody waits for ever.
    assert rest == ([*before, last][len(read) :] or [last])
