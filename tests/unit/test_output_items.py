"""The output of a response object, filled from what its stream told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.output_items import OutputItems
from tests.captures import Capture, event_streams
from tests.fake_scripts import event, response_object, vllm_events

WHOLE = [
    capture
    for capture in event_streams()
    if capture.events and capture.events[-1].startswith(b"event: response.completed\n")
]
FROM_0 = [x for x in WHOLE if x.events[0].startswith(b"event: response.created\n")]
ONE_DELTA = "a3_stream_truncated_one_token"
OLD = [capture for capture in FROM_0 if capture.version < "0.14" and capture.name != ONE_DELTA]
NEW = [capture for capture in FROM_0 if capture.version >= "0.14" or capture.name == ONE_DELTA]
DONE = "response.output_item.done"


def payload(block: bytes) -> Any:
    """Decode an event's data."""
    return json.loads(block.partition(b"data: ")[2])


def last_response(block: bytes) -> bytes:
    """Cut the response object out of vLLM's last event, without parsing it."""
    text = block.partition(b'"response":')[2]
    return text[: text.rindex(b',"sequence_number":')]


def fill(blocks: list[bytes], response: bytes) -> bytes:
    """Let the items of these events be seen, then fill the response."""
    items = OutputItems()
    for block in blocks:
        items.take(block)
    return items.fill(response)


@pytest.mark.parametrize("capture", OLD, ids=lambda capture: capture.id)
def test_old_servers_last_payload_is_filled(capture: Capture) -> None:
    """VLLM 0.11 tells the last delta alone: ``output`` becomes what output_item.done said."""
    before = last_response(capture.events[-1])
    after = fill(capture.events, before)
    done = [payload(x)["item"] for x in capture.events if payload(x)["type"] == DONE]
    assert json.loads(after) == json.loads(before) | {"output": done}
    assert done
    assert after.startswith(before.partition(b'"output":')[0])
    assert after.endswith(before.partition(b'"parallel_tool_calls":')[2])


def test_captures_of_old_servers_need_it() -> None:
    """The two that the issue names are among them, and are changed."""
    named = [x for x in OLD if x.name in {"a1_stream_truncated", "b4_stream_stop_string"}]
    assert len(named) == 2
    for capture in named:
        before = last_response(capture.events[-1])
        assert fill(capture.events, before) != before


@pytest.mark.parametrize("capture", NEW, ids=lambda capture: capture.id)
def test_newer_servers_last_payload_stays(capture: Capture) -> None:
    """Since 0.14 the last payload tells it all, but for a message without a word: it stays.

    So it does on 0.11 where the last delta was the only one.
    """
    before = last_response(capture.events[-1])
    assert fill(capture.events, before) == before


def item(index: int, text: str, **members: Any) -> bytes:
    """Write an event that says that an item is done."""
    part = {"type": "output_text", "text": text}
    told = {"id": f"msg_{index}", "type": "message", "content": [part]} | members
    return event(DONE, index, output_index=index, item=told)


def test_more_items_than_the_last_payload_has() -> None:
    """Items come in the order of their index, whichever was done first."""
    response = json.dumps(response_object("completed", output=[])).encode()
    filled = json.loads(fill([item(1, "two"), item(0, "one")], response))
    assert [x["id"] for x in filled["output"]] == ["msg_0", "msg_1"]
    assert [x["content"][0]["text"] for x in filled["output"]] == ["one", "two"]


def test_item_that_is_told_again_counts_once() -> None:
    """The last word on an index stands."""
    response = json.dumps(response_object("completed")).encode()
    (only,) = json.loads(fill([item(0, "one"), item(0, "other")], response))["output"]
    assert only["content"][0]["text"] == "other"


def test_function_calls_count_by_their_arguments() -> None:
    """A tool call has no text: its arguments tell which of the two says more."""
    call = {"type": "function_call", "content": None, "arguments": '{"a":1}'}
    short = item(0, "", **(call | {"arguments": ""}))
    response = json.dumps(response_object("completed", output=[payload(short)["item"]])).encode()
    (filled,) = json.loads(fill([item(0, "", **call)], response))["output"]
    assert filled["arguments"] == '{"a":1}'


def test_missing_output_is_added() -> None:
    """A response object without the member gets it."""
    assert json.loads(fill([item(0, "one")], b'{"id":"r"}'))["output"]


@pytest.mark.parametrize(
    "response", [b"[]", b"{", b'{"id":"r"}', b'{"output":[{"content":[{"text":"longer"}]}]}']
)
def test_nothing_better_is_known(response: bytes) -> None:
    """What tells as much, or is no object at all, stays as it is."""
    assert fill(vllm_events()[:3], response) == response
    if response.startswith(b'{"output'):
        assert fill([item(0, "short")], response) == response


@pytest.mark.parametrize(
    "block",
    [
        b"data: response.output_item.done\n\n",
        b'data: {"type":"response.output_item.done"}\n\n',
        b'data: {"type":"x","output_index":0,"item":{"a":"response.output_item.done"}}\n\n',
        b'data: {"type":"response.output_item.done","output_index":"a","item":{}}\n\n',
        b'data: {"type":"response.output_item.done","output_index":0,"item":"\xff"}\n\n',
        b": response.output_item.done\n\n",
    ],
)
def test_what_is_no_item(block: bytes) -> None:
    """Only a whole event of that type, with an index, is an item."""
    assert fill([block], b"{}") == b"{}"
