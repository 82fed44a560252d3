"""The fake Responses API keeps to what real servers were seen to do: tests lean on it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.captures import load
from tests.e2e.wire import RESPONSES, connect, exchange, post_stream
from tests.fake_responses_api import STORE_FALSE, STORE_OFF, FakeResponsesApi

if TYPE_CHECKING:
    from tests.fake_vllm import FakeVllm

BACKGROUND = b'{"input":"x","stream":true,"background":true,"max_output_tokens":2}'


async def test_replay_and_its_cursor(fake: FakeVllm) -> None:
    """As captures c2, c3, c6, c7 and r1: the cursor is an index, also a negative one."""
    FakeResponsesApi(fake)
    direct = await post_stream(fake.url, BACKGROUND)
    events = direct.chunks
    assert events[-1].startswith(b"event: response.completed\n")
    assert b'"status":"incomplete"' in events[-1]
    target = RESPONSES + "/resp_1?stream=true"
    for cursor, want in [("", events), ("3", events[4:]), ("-2", events[-1:]), ("-1", events)]:
        query = f"&starting_after={cursor}" if cursor else ""
        assert (await exchange(fake.url, "GET", target + query)).chunks == want
    assert (await exchange(fake.url, "GET", target + "&starting_after=-100")).ending == "cut"
    refused = await exchange(fake.url, "GET", target + "&starting_after=abc")
    assert refused.status == load("0.32.0", "c7_replay_truncated_after_abc").status == 400


async def test_cursor_at_the_end_hangs(fake: FakeVllm) -> None:
    """As capture c5: 200, no byte, open for ever."""
    FakeResponsesApi(fake)
    last = len((await post_stream(fake.url, BACKGROUND)).chunks) - 1
    async with connect(fake.url) as wire:
        await wire.request("GET", RESPONSES + f"/resp_1?stream=true&starting_after={last}")
        assert (await wire.head()).status == 200
        asked = await fake.exchange(1)
        assert not asked.finished.is_set()


async def test_cancel(fake: FakeVllm) -> None:
    """As captures e1 to e5: the object says cancelled, the streams never end, twice is 400."""
    api = FakeResponsesApi(fake, gated=True)
    async with connect(fake.url) as wire:
        await wire.post(BACKGROUND)
        await wire.head()
        await fake.until(lambda: "resp_1" in api.runs)
        api.step("resp_1", 3)
        for _ in range(3):
            await wire.event()
        shown = await exchange(fake.url, "GET", RESPONSES + "/resp_1")
        assert shown.json()["status"] == "queued"
        cancel = RESPONSES + "/resp_1/cancel"
        assert (await exchange(fake.url, "POST", cancel)).json()["status"] == "cancelled"
        again = await exchange(fake.url, "POST", cancel)
        assert (again.status, again.body) == (400, _body_of("e5_cancel_again", again.body))
        api.step("resp_1", 100)
        assert not (await fake.exchange()).finished.is_set()
        assert len(api.runs["resp_1"].events) == 3


async def test_stream_of_what_was_no_background_stream_is_cut(fake: FakeVllm) -> None:
    """As captures d3 and d6: 200 and then the connection is cut."""
    FakeResponsesApi(fake)
    for body in (b'{"input":"x"}', b'{"input":"x","background":true}'):
        response_id = (await post_stream(fake.url, body)).json()["id"]
        got = await exchange(fake.url, "GET", f"{RESPONSES}/{response_id}?stream=true")
        assert (got.status, got.body, got.ending) == (200, b"", "cut")


async def test_unknown_and_unsupported(fake: FakeVllm) -> None:
    """As captures f1 to f6, g1 and g5."""
    FakeResponsesApi(fake, store=False)
    unknown = await exchange(fake.url, "GET", RESPONSES + "/resp_unknown")
    assert (unknown.status, unknown.body) == (404, _body_of("f1_get_unknown", unknown.body))
    assert (await exchange(fake.url, "DELETE", RESPONSES + "/resp_unknown")).status == 405
    refused = await post_stream(fake.url, BACKGROUND)
    assert (refused.status, refused.body) == (400, load("0.32.0", STORE_OFF).body)
    refused = await post_stream(fake.url, b'{"background":true,"store":false}')
    assert (refused.status, refused.body) == (400, load("0.32.0", STORE_FALSE).body)


async def test_direct_generation_ends_with_its_client(fake: FakeVllm) -> None:
    """VLLM aborts a foreground generation when its client leaves, a background one never."""
    api = FakeResponsesApi(fake, gated=True)
    for number, (body, aborted) in enumerate([(b'{"stream":true}', True), (BACKGROUND, False)]):
        async with connect(fake.url) as wire:
            await wire.post(body)
            await wire.head()
            wire.leave()
            await (await fake.exchange(number)).until_finished()
        assert list(api.runs.values())[number].aborted is aborted


async def test_late_error(fake: FakeVllm) -> None:
    """As captures n_*: two events, then a cut when direct, silence in the background."""
    FakeResponsesApi(fake, fail_after=2)
    direct = await post_stream(fake.url, b'{"stream":true}')
    assert (len(direct.chunks), direct.ending) == (2, "cut")
    async with connect(fake.url) as wire:
        await wire.post(BACKGROUND)
        await wire.head()
        assert [json.loads((await wire.event()).partition(b"data: ")[2])["type"] for _ in "ab"]
        assert not (await fake.exchange(1)).finished.is_set()


def _body_of(name: str, like: bytes) -> bytes:
    """Take a capture's body, with the spaces that json.dumps writes where `like` has them."""
    body = load("0.32.0", name).body
    return json.dumps(json.loads(body)).encode() if b'": ' in like else body
