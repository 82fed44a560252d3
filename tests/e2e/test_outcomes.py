"""How streams ended is counted, each of them once, by the word that tells an operator most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.background import MODES, blocks, create, creating, following, get, replay
from tests.e2e.wire import RESPONSES, connect, exchange, post_stream
from tests.fake_responses_api import FakeResponsesApi
from tests.fake_scripts import answer, event, response_object, stream, vllm_events
from tests.prometheus import outcomes, total, until_outcomes, until_total

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import FakeVllm

EVENTS = vllm_events()
CORRECTIONS = "lastword_corrections_total"


@pytest.mark.parametrize("correct", ["on", "observe"])
@pytest.mark.parametrize("status", ["completed", "incomplete", "failed", "cancelled"])
async def test_terminal_events(
    status: str, correct: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A stream ended as its terminal event says, corrected or only observed."""
    proxy = await lastword(correct=correct)
    fake.handler = stream(vllm_events(status))
    await post_stream(proxy.url)
    await until_outcomes(proxy.admin_url, **{status: 1})
    wrong = status != "completed"
    assert await total(proxy.admin_url, CORRECTIONS, mode=correct) == wrong
    assert await total(proxy.admin_url, CORRECTIONS) == wrong
    assert await total(proxy.admin_url, "lastword_events_total") == len(EVENTS)
    for name in ("lastword_time_to_first_event_seconds", "lastword_stream_duration_seconds"):
        assert await total(proxy.admin_url, f"{name}_count") == 1
    first, whole = [
        await total(proxy.admin_url, f"lastword_{name}_seconds_sum")
        for name in ("time_to_first_event", "stream_duration")
    ]
    assert 0 < first <= whole


@pytest.mark.parametrize("correct", ["on", "observe"])
@pytest.mark.parametrize("how", ["cut", "end", "reset"])
async def test_lost_streams(
    how: Any, correct: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A stream that upstream did not end is lost, whatever the proxy wrote at its end."""
    proxy = await lastword(correct=correct)
    fake.handler = stream(EVENTS[:4], ending=how)
    await post_stream(proxy.url)
    await until_outcomes(proxy.admin_url, lost=1)
    assert await total(proxy.admin_url, CORRECTIONS) == 0


async def test_client_that_leaves(fake: FakeVllm, lastword: StartLastword) -> None:
    """Before the terminal event the client has gone; behind it the stream was whole."""
    proxy = await lastword(correct="observe")  # no end of our own: the client leaves before it
    fake.handler = stream(EVENTS[:3], ending="hang")
    async with connect(proxy.url) as wire:
        await wire.post()
        await wire.head()
        await wire.chunk()
        assert await total(proxy.admin_url, "lastword_active_streams") == 1
    await until_outcomes(proxy.admin_url, client_gone=1)
    assert await total(proxy.admin_url, "lastword_active_streams") == 0

    fake.handler = stream(EVENTS, ending="hang")
    async with connect(proxy.url) as wire:
        await wire.post()
        await wire.head()
        body = b""
        while body.count(b"\n\n") < len(EVENTS):
            body += await wire.chunk()
    await until_outcomes(proxy.admin_url, client_gone=1, incomplete=1)


async def test_shutdown(fake: FakeVllm, lastword: StartLastword) -> None:
    """A stream that our own shutdown ends is no loss of upstream's."""
    proxy: Any = await lastword(shutdown_grace_s=0)
    fake.handler = stream(EVENTS[:3], ending="hang")
    async with connect(proxy.url) as wire:
        await wire.post()
        head = await wire.head()
        await wire.chunk()
        await proxy.gateway.shut_down()
        assert (await wire.body(head)).ending == "cut"
    await until_outcomes(proxy.admin_url, stopped=1)


async def test_what_is_no_stream(fake: FakeVllm, lastword: StartLastword) -> None:
    """Answers, errors and streams that nobody looked at are not counted as streams."""
    proxy = await lastword()
    fake.handler = answer(200)
    await post_stream(proxy.url)
    fake.handler = stream(EVENTS)
    await exchange(proxy.url, "POST", "/v1/chat/completions", body=b"{}")
    await post_stream(proxy.url, headers=[("Lastword-Correct", "off")])
    await fake.stop_listening()
    await fake.drop_connections()
    assert (await post_stream(proxy.url)).status == 502
    assert await outcomes(proxy.admin_url) == {}
    assert await total(proxy.admin_url, "lastword_upstream_errors_total", kind="refused") == 1
    assert await total(proxy.admin_url, "lastword_upstream_errors_total") == 1


@pytest.mark.parametrize("mode", MODES)
async def test_runs_and_replays(mode: str, fake: FakeVllm, lastword: StartLastword) -> None:
    """A run is one stream, however many follow it; replays are counted by their source."""
    proxy = await lastword(background=mode)
    api = FakeResponsesApi(fake, gated=True)
    async with creating(proxy.url, gated=fake) as creator:
        await creator.read(1)
        async with following(proxy.url) as reader:
            await reader.read(1)
            assert await total(proxy.admin_url, "lastword_active_runs") == 1
            assert await total(proxy.admin_url, "lastword_active_followers") == 2
            api.step(next(iter(api.runs)), 100)
            await reader.rest()
        await creator.rest()
    await until_outcomes(proxy.admin_url, completed=1)
    await until_total(proxy.admin_url, 1, "lastword_copies_total")
    assert (await replay(proxy.url)).body == creator.data
    assert (await get(proxy.url)).status == 200
    replays = {
        source: await total(proxy.admin_url, "lastword_replays_total", source=source)
        for source in ("copy_live", "copy_stored", "upstream")
    }
    assert replays == {"copy_live": 1, "copy_stored": 1, "upstream": 0}
    for gauge in ("runs", "followers", "streams"):
        await until_total(proxy.admin_url, 0, f"lastword_active_{gauge}")
    assert await total(proxy.admin_url, "lastword_time_to_first_event_seconds_count") == 1
    assert await total(proxy.admin_url, "lastword_store_append_duration_seconds_count") > 0
    assert await total(proxy.admin_url, "lastword_store_bytes") > len(creator.data)
    assert await total(proxy.admin_url, "lastword_store_max_bytes") == 256 * 1024 * 1024
    assert await outcomes(proxy.admin_url) == {"completed": 1}


async def test_runs_that_are_lost_or_cancelled(fake: FakeVllm, lastword: StartLastword) -> None:
    """A lost run is lost, a cancelled one cancelled, a stopped one stopped."""
    proxy: Any = await lastword(background="proxy", shutdown_grace_s=0)
    FakeResponsesApi(fake)
    fake.script(stream(vllm_events(response_id="lost")[:4], ending="cut"))
    await create(proxy.url)
    await until_outcomes(proxy.admin_url, lost=1)
    for name in ("cancelled", "stopped"):
        fake.script(stream(vllm_events(response_id=name)[:4], ending="hang"))
        async with creating(proxy.url) as follower:
            await follower.read(4)
            if name == "cancelled":
                await exchange(proxy.url, "POST", f"{RESPONSES}/{name}/cancel")
            else:
                await proxy.gateway.shut_down()
            await follower.rest()
    await until_outcomes(proxy.admin_url, lost=1, cancelled=1, stopped=1)


async def test_replays_that_upstream_gives(fake: FakeVllm, lastword: StartLastword) -> None:
    """Without copies a replay is a stream like any other, and its source is told."""
    proxy = await lastword()
    fake.handler = stream(EVENTS)
    await replay(proxy.url)
    await until_outcomes(proxy.admin_url, incomplete=1)
    assert await total(proxy.admin_url, "lastword_replays_total", source="upstream") == 1


async def test_dropped_copies_by_reason(fake: FakeVllm, lastword: StartLastword) -> None:
    """Why a copy was dropped is one of a few words."""
    proxy = await lastword(background="proxy", max_copy_bytes=3000)
    name = "lastword_dropped_copies_total"
    FakeResponsesApi(fake)
    long = [event("response.output_text.delta", n, delta="x" * 900) for n in range(1, 9)]
    last = event("response.completed", 9, response=response_object("completed"))
    fake.script(stream([EVENTS[0], *long, last]))
    assert len(blocks((await create(proxy.url)).body)) == 10
    await until_total(proxy.admin_url, 1, name, reason="full")
    gap = [vllm_events(response_id="gap")[n] for n in (0, 1, 3)]
    fake.script(
        stream([*gap, event("response.completed", 4, response=response_object("completed", "gap"))])
    )
    await create(proxy.url)
    await until_total(proxy.admin_url, 1, name, reason="stream")
    assert await total(proxy.admin_url, name) == 2
    assert await total(proxy.admin_url, "lastword_copies_total") == 0
