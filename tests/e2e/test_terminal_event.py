"""The terminal rule through the whole proxy: the one change, and that nothing else changes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.captures import VERSIONS, Capture, corrected, event_streams
from tests.e2e.wire import STREAM, Answer, connect, exchange, post_stream
from tests.fake_scripts import cut, event, play, response_object, stream, vllm_events

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import FakeVllm

LINE_ENDS = [
    pytest.param(b"\n", id="LF"),
    pytest.param(b"\r\n", id="CRLF"),
    pytest.param(b"\r", id="CR"),
]


def expected(capture: Capture) -> bytes:
    """Say what a capture must look like downstream."""
    return corrected(capture.body) if capture.is_truncated else capture.body


async def play_through(fake: FakeVllm, url: str, capture: Capture) -> Answer:
    """Send a capture's request through the proxy while the fake plays its answer."""
    fake.script(play(capture))
    target = capture.target.replace("<id of the first capture>", "resp_1")
    body = STREAM if capture.method == "POST" else None
    return await exchange(url, capture.method, target, body=body)


@pytest.mark.parametrize("version", VERSIONS)
async def test_captures_differ_only_in_the_name_of_a_truncated_end(
    version: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A truncated stream ends in response.incomplete, direct or replayed; no other byte differs."""
    proxy = await lastword()
    captures = [x for x in event_streams() if x.version == version and x.curl_exit == 0]
    assert len(captures) > 10
    for capture in captures:
        answer = await play_through(fake, proxy.url, capture)
        assert answer.status == 200, capture.id
        assert answer.body == expected(capture), capture.id
        assert answer.ending == "clean", capture.id


@pytest.mark.parametrize("newline", LINE_ENDS)
async def test_terminal_event_cut_at_every_byte(
    newline: bytes, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Wherever the transport cuts the terminal event, it is corrected and nothing is lost."""
    proxy = await lastword()
    created, last = (
        event("response.created", 0, newline=newline, response=response_object("in_progress")),
        event("response.completed", 1, newline=newline, response=response_object("incomplete")),
    )
    body = created + last
    want = corrected(body, newline=newline)
    async with connect(proxy.url) as wire:
        for place in range(len(created), len(body)):
            fake.script(stream(cut(body, [place])))
            await wire.post()
            answer = await wire.answer()
            assert (answer.body, answer.ending) == (want, "clean"), place


@pytest.mark.parametrize("newline", LINE_ENDS)
async def test_one_byte_at_a_time(newline: bytes, fake: FakeVllm, lastword: StartLastword) -> None:
    """Line ends of each kind are kept, also when every byte comes alone."""
    proxy = await lastword()
    body = b"".join(vllm_events(deltas=1, newline=newline))
    fake.script(stream(cut(body, range(1, len(body)))))
    answer = await post_stream(proxy.url)
    assert answer.body == corrected(body, newline=newline)


TERMINAL = response_object("incomplete")
PAYLOAD = json.dumps(
    {"response": TERMINAL, "sequence_number": 1, "type": "response.completed"}
).encode()
NEW_PAYLOAD = PAYLOAD.replace(b'"response.completed"', b'"response.incomplete"')
UNTYPED = json.dumps({"response": TERMINAL, "sequence_number": 1}).encode()
FIRST_MEMBER = b'{"type": "response.completed", "response": {"status": "incomplete"}}'


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        pytest.param(b"data: %b\n\n" % PAYLOAD, b"data: %b\n\n" % NEW_PAYLOAD, id="data only"),
        pytest.param(
            b"event: response.completed\ndata: %b\n\n" % UNTYPED,
            b"event: response.incomplete\ndata: %b\n\n" % UNTYPED,
            id="event field only",
        ),
        pytest.param(
            b"event: message\ndata: %b\n\n" % PAYLOAD,
            b"event: message\ndata: %b\n\n" % NEW_PAYLOAD,
            id="type decides, the other name stays",
        ),
        pytest.param(
            b"event:response.completed\ndata:%b\n\n" % PAYLOAD,
            b"event:response.incomplete\ndata:%b\n\n" % NEW_PAYLOAD,
            id="no space after the colon",
        ),
        pytest.param(
            b"data: %b\nevent: response.completed\nid: 7\n: why\n\n" % PAYLOAD,
            b"data: %b\nevent: response.incomplete\nid: 7\n: why\n\n" % NEW_PAYLOAD,
            id="fields in another order, an id, a comment",
        ),
        pytest.param(
            FIRST_MEMBER.join([b"data: ", b"\n\n"]),
            FIRST_MEMBER.replace(b"completed", b"incomplete").join([b"data: ", b"\n\n"]),
            id="type first",
        ),
        pytest.param(
            b'data: {"type":\ndata: "response.completed",\ndata:"response":'
            b'{"status":\ndata: "incomplete"}}\n\n',
            b'data: {"type":\ndata: "response.incomplete",\ndata:"response":'
            b'{"status":\ndata: "incomplete"}}\n\n',
            id="several data lines",
        ),
        pytest.param(
            b"event: response.completed\ndata: {half\n\n",
            b"event: response.completed\ndata: {half\n\n",
            id="not JSON",
        ),
    ],
)
async def test_shapes_of_the_terminal_event(
    sent: bytes, received: bytes, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Only the names that say response.completed change, whatever the event looks like."""
    proxy = await lastword()
    created = vllm_events()[0]
    fake.script(stream([created, sent]))
    assert (await post_stream(proxy.url)).body == created + received


@pytest.mark.parametrize(
    ("status", "name"),
    [
        ("completed", "response.completed"),
        ("incomplete", "response.incomplete"),
        ("failed", "response.failed"),
        ("cancelled", "response.failed"),
        ("in_progress", "response.completed"),
        ("queued", "response.completed"),
    ],
)
async def test_name_follows_the_status(
    status: str, name: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """The last event is named by the status; a status that ends nothing changes nothing."""
    proxy = await lastword()
    events = vllm_events(status)
    fake.script(stream(events))
    assert (await post_stream(proxy.url)).body == corrected(b"".join(events), name)


@pytest.mark.parametrize("size", [16 * 2**10, 128 * 2**10, 2**20, 16 * 2**20])
async def test_large_terminal_event(size: int, fake: FakeVllm, lastword: StartLastword) -> None:
    """A terminal event of many megabytes is corrected like a small one."""
    proxy = await lastword()
    events = vllm_events(padding=size)
    fake.script(stream(events))
    answer = await post_stream(proxy.url)
    assert answer.body == corrected(b"".join(events))
    assert answer.chunks[-1] == corrected(events[-1])


@pytest.mark.parametrize("tail", [b"", b"\n"], ids=["in its data line", "without the blank line"])
async def test_last_event_without_its_blank_line_is_completed(
    tail: bytes, fake: FakeVllm, lastword: StartLastword
) -> None:
    """At EOF a terminal event whose JSON is whole is sent with the blank line that it lacks."""
    proxy = await lastword()
    body = b"".join(vllm_events())
    fake.script(stream([body.removesuffix(b"\n\n") + tail]))
    answer = await post_stream(proxy.url)
    assert answer.body == corrected(body)
    assert answer.ending == "clean"


@pytest.mark.parametrize("alone", [True, False])
async def test_byte_order_mark_is_dropped(
    alone: bool,  # noqa: FBT001 -- a parameter of the test
    fake: FakeVllm,
    lastword: StartLastword,
) -> None:
    """A BOM would cost openai-python the first event, so it does not go on."""
    proxy = await lastword()
    bom, events = b"\xef\xbb\xbf", vllm_events()
    pieces = [bom[:1], bom[1:], *events] if alone else [bom + events[0], *events[1:]]
    fake.script(stream(pieces))
    assert (await post_stream(proxy.url)).body == corrected(b"".join(events))


async def test_what_is_not_an_event_of_vllm_passes(fake: FakeVllm, lastword: StartLastword) -> None:
    """Comments, unknown fields, keepalive events and bad UTF-8 stay as they are."""
    proxy = await lastword()
    strange = [
        b": ping\n\n",
        b"retry: 10\n\n",
        b'event: keepalive\ndata: {"type":"keepalive"}\n\n',
        b"foo: bar\ndata: \xff\xfe\n\n",
        "data: \u2028 \u0085\n\n".encode(),
        b"\n\n",
    ]
    events = vllm_events()
    fake.script(stream([*events[:2], *strange, *events[2:]]))
    want = b"".join([*events[:2], *strange, corrected(b"".join(events[2:]))])
    assert (await post_stream(proxy.url)).body == want


@pytest.mark.parametrize(
    "target",
    [
        "/v1/responses/resp_1?stream=true",
        "/v1/responses/resp_1?stream=true&starting_after=3",
        "/v1/responses/resp%5F1?stream=1",
        "/%761/responses/resp_1?stream=true",
    ],
)
async def test_replay_is_corrected(target: str, fake: FakeVllm, lastword: StartLastword) -> None:
    """A replay by vLLM itself is corrected too, on any spelling of the path that vLLM accepts."""
    proxy = await lastword()
    events = vllm_events()
    fake.script(stream(events))
    answer = await exchange(proxy.url, "GET", target)
    assert answer.body == corrected(b"".join(events))
    assert fake.requests[0].target == target.encode()
