"""POST /v1/responses with background: who makes the response, and what the client gets of it."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING

import pytest

from tests.captures import load
from tests.e2e.background import (
    MODES,
    blocks,
    cancel,
    create,
    creating,
    expected,
    get,
    kind,
    payload,
    refusal,
    replay,
)
from tests.e2e.wire import RESPONSES, exchange, post_stream
from tests.fake_responses_api import STORE_FALSE, STORE_OFF, FakeResponsesApi
from tests.fake_scripts import EVENT_STREAM, answer, event, response_object, stream, vllm_events

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import FakeVllm


@pytest.mark.parametrize("mode", MODES)
async def test_stream_and_its_replay_are_the_same_bytes(
    mode: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """The creating client and every later reader get the same corrected stream."""
    proxy = await lastword(background=mode)
    FakeResponsesApi(fake)
    created = await create(proxy.url, max_output_tokens=2)
    assert created.status == 200
    assert created.ending == "clean"
    assert created.values("content-type") == [b"text/event-stream; charset=utf-8"]
    assert blocks(created.body) == expected("incomplete", deltas=2)
    assert kind(blocks(created.body)[-1]) == ("response.incomplete", "incomplete", 9)
    again = await replay(proxy.url)
    assert (again.body, again.ending) == (created.body, "clean")
    assert again.values("cache-control") == [b"no-cache"]
    shown = (await get(proxy.url)).json()
    assert (shown["status"], shown["background"]) == ("incomplete", True)
    assert len(fake.requests) == 1


async def test_upstream_mode_sends_the_request_as_it_came(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """VLLM makes the response: not a byte of the body is changed."""
    proxy = await lastword(background="upstream")
    FakeResponsesApi(fake)
    body = b'{ "input":"\\u00e9", "background" : "on","stream":1, "store":true }'
    got = await exchange(proxy.url, "POST", RESPONSES, [("X-Mine", "a")], body)
    assert blocks(got.body) == expected()
    assert bytes(fake.requests[0].body) == body
    assert fake.requests[0].values("x-mine") == [b"a"]


BODIES = [
    (
        b'{ "input":"\\u00e9 \\ud800", "background" : true,\n"n":1.10, "stream":true }',
        b'{ "input":"\\u00e9 \\ud800", "n":1.10, "stream":true }',
    ),
    (b'{"background":"true","stream":"1","x":[1]}', b'{"stream":true,"x":[1]}'),
    (
        b'{"stream":false,"x":{"background":true},"background":1}',
        b'{"stream":true,"x":{"background":true}}',
    ),
    (b'{"background":false,"stream":"on","background":"YES"}', b'{"stream":true}'),
    (b'{"b\\u0061ckground":true}', b'{"stream":true}'),
    (b'{"background":true,"store":true}', b'{"store":true,"stream":true}'),
]


async def test_proxy_mode_changes_two_members_of_the_body(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """``background`` is taken out, ``stream`` is true, every other byte goes up as it came."""
    proxy = await lastword(background="proxy")
    FakeResponsesApi(fake)
    for number, (body, up) in enumerate(BODIES):
        assert (await post_stream(proxy.url, body)).status == 200
        request = fake.requests[number]
        assert bytes(request.body) == up
        assert request.values("content-length") == [b"%d" % len(up)]
        assert request.values("accept-encoding") == [b"identity"]


async def test_proxy_mode_puts_background_back(fake: FakeVllm, lastword: StartLastword) -> None:
    """Clients decide by it whether to resume: it is true in every response object."""
    proxy = await lastword(background="proxy")
    bare = response_object("in_progress")
    del bare["background"]
    events = [
        event("response.created", 0, response=bare),
        event("response.in_progress", 1, response=bare | {"background": None}),
        event("response.output_text.delta", 2, delta='"background":false'),
        event("response.completed", 3, response=bare | {"status": "completed", "x": 1}),
    ]
    fake.script(stream(events))
    created, in_progress, delta, completed = blocks((await create(proxy.url)).body)
    first = b'"response":{"background":true,"id":'
    assert created == events[0].replace(b'"response":{"id":', first)
    assert in_progress == events[1].replace(b'"background":null', b'"background":true')
    assert delta == events[2]
    assert completed == events[3].replace(b'"response":{"id":', first)
    assert (await get(proxy.url)).json()["background"] is True


async def test_auto_asks_vllm_first(fake: FakeVllm, lastword: StartLastword) -> None:
    """Where vLLM's store is off, the proxy makes the response, and remembers that it must."""
    for store, want in ((True, [True, True]), (False, [True, None, None])):
        proxy = await lastword(background="auto")
        FakeResponsesApi(fake, store=store)
        known = len(fake.requests)
        for number in (1, 2):
            got = await create(proxy.url, request_id=f"mine-{number}")
            assert blocks(got.body) == expected(response_id=f"mine-{number}")
        assert [ask.json().get("background") for ask in fake.requests[known:]] == want


async def test_auto_passes_other_refusals(fake: FakeVllm, lastword: StartLastword) -> None:
    """Only the refusal for want of a store makes the proxy do it itself."""
    proxy = await lastword(background="auto")
    api = FakeResponsesApi(fake, store=False)
    refused = await create(proxy.url, store=False)
    assert (refused.status, refused.body) == (400, load("0.32.0", STORE_FALSE).body)
    other = b'{"error":{"message":"set VLLM_ENABLE_RESPONSES_API_STORE=1","code":500}}'
    fake.script(answer(500, body=other))
    refused = await create(proxy.url)
    assert (refused.status, refused.body) == (500, other)
    assert len(fake.requests) == 2
    assert not api.runs


async def test_upstream_mode_passes_the_refusal(fake: FakeVllm, lastword: StartLastword) -> None:
    """``upstream`` is what was asked for, so vLLM's word stands."""
    proxy = await lastword(background="upstream")
    FakeResponsesApi(fake, store=False)
    refused = await create(proxy.url)
    assert (refused.status, refused.body) == (400, load("0.32.0", STORE_OFF).body)


@pytest.mark.parametrize("mode", MODES)
async def test_background_needs_store(mode: str, fake: FakeVllm, lastword: StartLastword) -> None:
    """``background`` with ``store: false`` is vLLM's 400, whoever would make the response."""
    proxy = await lastword(background=mode)
    FakeResponsesApi(fake)
    for stream_it in (True, False):
        status, param, message = refusal(await create(proxy.url, stream=stream_it, store="off"))
        assert (status, param) == (400, "background")
        assert "`store` is true" in message


async def test_pass_keeps_nothing(fake: FakeVllm, lastword: StartLastword) -> None:
    """The mode ``pass`` corrects vLLM's own replays on the way, and knows nothing itself."""
    proxy = await lastword(background="pass")
    FakeResponsesApi(fake)
    created = await create(proxy.url, max_output_tokens=2)
    assert blocks(created.body) == expected("incomplete", deltas=2)
    assert (await replay(proxy.url, 3)).body == b"".join(expected("incomplete", deltas=2)[4:])
    assert len(fake.requests) == 2
    assert (await exchange(proxy.url, "DELETE", RESPONSES + "/resp_1")).status == 405


@pytest.mark.parametrize("mode", MODES)
async def test_errors_before_the_response_is_created_pass(
    mode: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """What vLLM refuses at once keeps its status, headers and body."""
    proxy = await lastword(background=mode)
    for status in (400, 404, 429, 500):
        body = b'{"error":{"message":"no","type":"x","param":null,"code":%d}}' % status
        headers = (("content-type", "application/json"), ("retry-after", "7"))
        fake.script(answer(status, headers, body))
        got = await create(proxy.url)
        assert (got.status, got.body) == (status, body)
        assert got.values("retry-after") == [b"7"]


@pytest.mark.parametrize("mode", MODES)
async def test_event_stream_without_a_response_is_502(
    mode: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Without ``response.created`` there is nothing to follow and nothing that could fail."""
    proxy = await lastword(background=mode)
    for chunks in ([], [b": hello\n\n", b'data: {"type":"error","message":"no"}\n\n']):
        for streams in (True, False):
            fake.script(stream(chunks))
            got = await create(proxy.url, stream=streams)
            assert got.status == 502
            assert "before the response was created" in got.json()["error"]["message"]


async def test_upstream_that_refuses_is_502(fake: FakeVllm, lastword: StartLastword) -> None:
    """Nothing listens at upstream: the proxy says so itself."""
    proxy = await lastword(background="auto")
    await fake.stop_listening()
    got = await create(proxy.url)
    assert got.status == 502
    assert "cannot be reached" in got.json()["error"]["message"]


async def test_request_without_background_is_relayed(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """A foreground stream is no run, and its id is asked from upstream."""
    proxy = await lastword(background="auto")
    FakeResponsesApi(fake)
    for word in (None, False, "off", 0):
        await create(proxy.url, background=word)
    assert (await get(proxy.url)).status == 200
    assert [request.method for request in fake.requests] == ["POST"] * 4 + ["GET"]


async def test_proxy_mode_without_stream_is_polled(fake: FakeVllm, lastword: StartLastword) -> None:
    """The client gets the response as it was created, queued, and asks until it has ended."""
    proxy = await lastword(background="proxy")
    api = FakeResponsesApi(fake, gated=True)
    whole = expected("incomplete", deltas=2)
    async with asyncio.TaskGroup() as group:
        begun = group.create_task(create(proxy.url, stream=False, max_output_tokens=2))
        await fake.until(lambda: "resp_1" in api.runs)
        api.step("resp_1")
    created = begun.result()
    assert created.values("content-type") == [b"application/json"]
    assert created.json() == payload(whole[0])["response"] | {"status": "queued"}
    assert fake.requests[0].json()["stream"] is True
    assert (await get(proxy.url)).json()["status"] == "in_progress"
    api.step("resp_1", 100)
    assert blocks((await replay(proxy.url)).body) == whole  # which ends once the run has
    assert (await get(proxy.url)).json() == payload(whole[-1])["response"]


async def test_queued_object_is_the_one_that_was_created(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """Also where the whole stream comes at once, nobody sees a queued one that has ended."""
    proxy = await lastword(background="proxy")
    fake.script(stream([b"".join(vllm_events("incomplete"))]))
    created = (await create(proxy.url, stream=False)).json()
    assert (created["status"], created["output"]) == ("queued", [])
    assert created["incomplete_details"] is None


async def test_object_tells_what_the_stream_told(fake: FakeVllm, lastword: StartLastword) -> None:
    """VLLM 0.11's last payload holds the last delta alone; GET shows the items that were done."""
    proxy = await lastword(background="proxy")
    capture = load("0.11.2", "b4_stream_stop_string")
    fake.script(stream(capture.events))
    streamed = blocks((await create(proxy.url)).body)
    done = [
        payload(x)["item"] for x in streamed if x.startswith(b"event: response.output_item.done")
    ]
    shown = (await get(proxy.url, response_id=payload(streamed[0])["response"]["id"])).json()
    assert shown["output"] == done
    assert payload(streamed[-1])["response"]["output"] != done  # the stream itself is untouched


async def test_upstream_mode_without_stream_is_vllms_own(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """The answer passes, and so do GET and cancel; there are no events to be streamed."""
    proxy = await lastword(background="upstream")
    api = FakeResponsesApi(fake, gated=True)
    created = await create(proxy.url, stream=False)
    assert (created.status, created.json()["status"]) == (200, "queued")
    assert fake.requests[0].json()["background"] is True
    status, param, message = refusal(await replay(proxy.url))
    assert (status, param) == (400, "stream")
    assert "GET without stream may still work" in message
    assert len(fake.requests) == 1
    assert (await get(proxy.url)).json()["status"] == "queued"
    assert (await cancel(proxy.url)).json()["status"] == "cancelled"
    assert api.runs["resp_1"].aborted
    # The cancel asks first how the response is: vLLM's own answer would be wrong once it has ended.
    assert [request.method for request in fake.requests] == ["POST", "GET", "GET", "POST"]


async def test_compressed_stream_is_kept_decoded(fake: FakeVllm, lastword: StartLastword) -> None:
    """A gateway before vLLM may compress all the same: followers get identity."""
    proxy = await lastword(background="proxy")
    squeeze = zlib.compressobj(wbits=31)
    events = vllm_events("incomplete")
    chunks = [squeeze.compress(x) + squeeze.flush(zlib.Z_SYNC_FLUSH) for x in events]
    chunks.append(squeeze.flush())
    fake.script(stream(chunks, headers=[*EVENT_STREAM, ("content-encoding", "gzip")]))
    got = await create(proxy.url)
    assert got.values("content-encoding") == []
    assert blocks(got.body) == expected("incomplete")
    assert (await replay(proxy.url)).body == got.body


async def test_queries(fake: FakeVllm, lastword: StartLastword) -> None:
    """As vLLM takes them: its booleans, the last of repeated keys, no empty value."""
    proxy = await lastword(background="proxy")
    FakeResponsesApi(fake)
    await create(proxy.url)
    whole = expected()
    streams = ["stream=true", "stream=1", "stream=on", "stream=True", "stream=false&stream=yes"]
    cursors: list[tuple[str, list[bytes]]] = [
        ("", whole),
        ("&starting_after=-1", whole),
        ("&starting_after=-77", whole),
        ("&starting_after=-99999999999999999999", whole),
        ("&starting_after=0", whole[1:]),
        ("&starting_after=0&starting_after=3", whole[4:]),
        ("&starting_after=%2B3", whole[4:]),
        (f"&starting_after={len(whole) - 1}", []),
        ("&starting_after=1000", []),
        ("&starting_after=99999999999999999999", []),
        ("&include=reasoning.encrypted_content&include_obfuscation=false", whole),
    ]
    for query in streams:
        assert blocks((await get(proxy.url, query)).body) == whole, query
    for query, want in cursors:
        got = await get(proxy.url, "stream=true" + query)
        assert (got.status, got.ending, blocks(got.body)) == (200, "clean", want), query
    for query in ("", "stream=false", "stream=0", "stream=true&stream=off", "starting_after=2"):
        assert (await get(proxy.url, query)).json()["status"] == "completed", query
    for query, param in [
        ("stream=", "stream"),
        ("stream=maybe", "stream"),
        ("stream=true&stream=", "stream"),
        ("stream=true&starting_after=", "starting_after"),
        ("stream=true&starting_after=abc", "starting_after"),
        ("stream=true&starting_after=1.5", "starting_after"),
        ("starting_after=1&starting_after=x", "starting_after"),
    ]:
        assert refusal(await get(proxy.url, query))[:2] == (400, param), query
    assert len(fake.requests) == 1


@pytest.mark.parametrize("mode", MODES)
async def test_comments_and_done_are_kept(
    mode: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A copy holds every block, in order, under its predecessor's number."""
    proxy = await lastword(background=mode)
    events = vllm_events("completed", background=True)
    chunks = [b": one\n\n", events[0], b": two\r\n\r\n", *events[1:], b"data: [DONE]\n\n"]
    fake.script(stream(chunks))
    got = await create(proxy.url)
    assert got.body == b"".join(chunks)
    assert (await replay(proxy.url)).body == got.body
    assert (await replay(proxy.url, 0)).body == b"".join(events[1:]) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("mode", MODES)
async def test_events_arrive_one_by_one(mode: str, fake: FakeVllm, lastword: StartLastword) -> None:
    """Each event reaches the creating client before the next one is made."""
    proxy = await lastword(background=mode)
    api = FakeResponsesApi(fake, gated=True)
    whole = expected()
    async with creating(proxy.url, gated=fake) as follower:
        for count in range(1, len(whole)):
            assert await follower.read(count) == whole[:count]
            api.step("resp_1")
        assert await follower.rest() == whole
        assert follower.ending == "clean"
