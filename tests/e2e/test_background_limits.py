"""Copies that are gone or cannot be kept: what is said, and that the live stream goes on."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from proxy.background import maker
from proxy.store import StoreUnavailableError
from proxy.store.memory import MemoryStore
from tests.e2e.background import (
    ALICE,
    BOB,
    blocks,
    create,
    creating,
    delete,
    expected,
    get,
    metric,
    payload,
    refusal,
    replay,
)
from tests.fake_responses_api import FakeResponsesApi
from tests.fake_scripts import event, response_object, stream, vllm_events
from tests.prometheus import until_total
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import StartLastword
    from tests.fake_vllm import FakeVllm

DROPPED = "lastword_dropped_copies_total"


async def test_expiry(fake: FakeVllm, lastword: StartLastword) -> None:
    """After ``copy_ttl_s`` the stream is 400 and says what helps; the object comes from vLLM."""
    proxy = await lastword(background="upstream", copy_ttl_s=0.01)
    FakeResponsesApi(fake)
    await create(proxy.url, ALICE, request_id="mine")
    async with asyncio.timeout(PATIENCE_S):
        while (gone := await replay(proxy.url, None, ALICE, response_id="mine")).status == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # it is swept once a second
    status, param, message = refusal(gone)
    assert (status, param) == (400, "stream")
    assert "expired" in message
    assert "GET without stream may still work" in message
    known = len(fake.requests)
    assert (await get(proxy.url, "", ALICE, response_id="mine")).json()["status"] == "completed"
    assert len(fake.requests) == known + 1
    assert (await get(proxy.url, "", BOB, response_id="mine")).status == 404
    again = await create(proxy.url, ALICE, request_id="mine", top_p=0.5)
    assert again.body == b"".join(expected(response_id="mine"))
    assert len(fake.requests) == known + 2


async def test_eviction(fake: FakeVllm, lastword: StartLastword) -> None:
    """When room is needed, the copy that ended first goes, whole."""
    size = len(b"".join(expected()))
    proxy = await lastword(background="upstream", max_store_bytes=3 * size)
    FakeResponsesApi(fake)
    for _ in range(4):
        assert blocks((await create(proxy.url)).body)[-1].startswith(b"event: response.completed")
    status, param, message = refusal(await replay(proxy.url))
    assert (status, param) == (400, "stream")
    assert "evicted" in message
    assert (await get(proxy.url)).status == 200
    last = await replay(proxy.url, response_id="resp_4")
    assert blocks(last.body) == expected(response_id="resp_4")
    assert await metric(proxy.admin_url, DROPPED) == 0


async def test_stream_that_never_says_what_it_is(
    fake: FakeVllm, lastword: StartLastword, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a response's id nothing can be kept or served: 502 once too much has come."""
    monkeypatch.setattr(maker, "_NAMELESS_BYTES", 4_000)
    proxy = await lastword(background="upstream")
    deltas = [event("response.output_text.delta", n, delta="x" * 500) for n in range(9)]
    fake.script(stream(deltas, ending="hang"))

    refused = await create(proxy.url)

    assert refused.status == 502
    assert "before the response was created" in refused.json()["error"]["message"]
    await fake.exchanges[0].until_closed()


async def test_gap_in_upstreams_numbers(fake: FakeVllm, lastword: StartLastword) -> None:
    """A copy with a hole in it would be a lie: it is dropped whole, the live stream goes on."""
    events = expected(deltas=9)
    told = [
        [*events[:4], *events[5:]],  # a gap
        [events[0] + events[1] + events[3], *events[4:]],  # in the very first chunk
        [*events[:5], events[2], *events[5:]],  # a step back
        [*events[:5], events[4], *events[5:]],  # a repeat
    ]
    for number, chunks in enumerate(told, 1):
        proxy = await lastword(background="upstream")
        api = FakeResponsesApi(fake)
        fake.script(stream(chunks, gated=True))
        fake.close_gates()
        fake.gate("0").open()
        async with creating(proxy.url) as creator:
            for place in range(1, len(chunks) - 1):
                fake.gate(str(place)).open()
            await creator.read(b"".join(chunks[:-1]).count(b"\n\n"))
            async with asyncio.timeout(PATIENCE_S):
                while await metric(proxy.admin_url, DROPPED) != 1:
                    pass
            assert refusal(await replay(proxy.url))[:2] == (400, "stream"), number
            assert (await get(proxy.url)).json()["status"] == "in_progress"
            fake.gate(str(len(chunks) - 1)).open()
            fake.gate("ending").open()
            await creator.rest()
            assert creator.data == b"".join(chunks)
            assert creator.ending == "clean"
        status, param, message = refusal(await replay(proxy.url))
        assert (status, param) == (400, "stream")
        assert "dropped" in message
        assert (await get(proxy.url)).status == 404  # vLLM's word
        assert fake.requests[-1].method == "GET"
        await until_total(proxy.admin_url, 1, DROPPED)
        assert not api.runs


async def test_copy_that_grows_too_large(fake: FakeVllm, lastword: StartLastword) -> None:
    """Beyond ``max_copy_bytes``, and with an event beyond ``max_event_bytes``: the same."""
    proxy = await lastword(background="proxy", max_copy_bytes=6000, max_event_bytes=9000)
    many = [event("response.output_text.delta", n, delta="x" * 500) for n in range(1, 40)]
    created, *_ = vllm_events()
    last = event("response.completed", 40, response=response_object("completed"))
    FakeResponsesApi(fake)
    fake.script(stream([created, *many, last]))
    got = await create(proxy.url)
    assert got.ending == "clean"
    assert [payload(x)["sequence_number"] for x in blocks(got.body)] == list(range(41))
    assert refusal(await replay(proxy.url))[:2] == (400, "stream")
    await until_total(proxy.admin_url, 1, DROPPED)
    long = event("response.output_text.delta", 1, delta="x" * 20_000)
    numbered = event("response.completed", 2, response=response_object("completed", "resp_2"))
    fake.script(stream([vllm_events(response_id="resp_2")[0], long, numbered]))
    got = await create(proxy.url)
    assert long in got.body
    assert got.body.endswith(numbered.replace(b'"background":false', b'"background":true'))
    await until_total(proxy.admin_url, 2, DROPPED)


async def test_one_large_event_is_kept(fake: FakeVllm, lastword: StartLastword) -> None:
    """Logprobs make events of many MB; what is within the limits is kept."""
    proxy = await lastword(background="proxy")
    events = vllm_events("incomplete", padding=17 * 1024 * 1024)
    fake.script(stream(events))
    got = await create(proxy.url)
    assert len(got.body) > 17 * 1024 * 1024
    assert (await replay(proxy.url)).body == got.body
    assert await metric(proxy.admin_url, DROPPED) == 0


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """Mount a tmpfs of one MiB, where that is allowed."""
    path.mkdir()
    try:
        subprocess.run(  # noqa: S603 - our own command
            ["mount", "-t", "tmpfs", "-o", "size=1m", "none", path],  # noqa: S607 - where mount is, differs
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=False)  # noqa: S603, S607 - as above


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Give a disk that is full after one MiB."""
    with small_disk(tmp_path / "small") as path:
        yield path


async def test_full_disk(disk: Path, fake: FakeVllm, lastword: StartLastword) -> None:
    """The disk is full: no live event is lost or held back, and the proxy serves on."""
    proxy = await lastword(background="proxy", store=f"sqlite:{disk / 'copies.db'}")
    FakeResponsesApi(fake)
    await create(proxy.url)
    filler = "x" * 4000
    many = [event("response.output_text.delta", n, delta=filler) for n in range(1, 500)]
    created, *_ = vllm_events(response_id="resp_big")
    last = event("response.completed", 500, response=response_object("completed", "resp_big"))
    fake.script(stream([created, *many, last]))
    got = await create(proxy.url)
    assert got.ending == "clean"
    assert [payload(x)["sequence_number"] for x in blocks(got.body)] == list(range(501))
    await until_total(proxy.admin_url, 1, DROPPED)
    assert blocks((await replay(proxy.url)).body) == expected()
    assert blocks((await create(proxy.url)).body) == expected(response_id="resp_2")


async def test_delete_where_the_store_takes_no_writes(
    fake: FakeVllm,
    lastword: StartLastword,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is 503 and says so, to the operator too; the copy is still there."""

    async def refuse(*_: object) -> None:
        raise StoreUnavailableError("the disk is full")

    proxy = await lastword(background="upstream")
    FakeResponsesApi(fake)
    created = await create(proxy.url, ALICE)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "drop", refuse)
        refused = await delete(proxy.url, ALICE)
    assert refused.status == 503
    assert "the disk is full" in refused.json()["error"]["message"]
    assert "a request failed since the store did" in capsys.readouterr().out
    assert (await replay(proxy.url, None, ALICE)).body == created.body
    assert (await delete(proxy.url, ALICE)).status == 200
