"""What a background run changes in a request's body and in its events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.background import (
    CreateRequest,
    as_queued,
    mark_background,
    read_create,
    sequence_number,
    to_foreground,
    truth,
)
from proxy.core.json_edit import NotAnObjectError
from tests.captures import event_streams
from tests.fake_scripts import event, response_object, vllm_events

TRUE = ["true", "True", "TRUE", "1", "on", "On", "yes", "t", "Y"]
FALSE = ["false", "False", "0", "off", "no", "f", "N"]
NEITHER = ["", " true", "2", "truth", "null", "enabled", "\u0661"]


@pytest.mark.parametrize(
    ("texts", "want"), [(TRUE, True), (FALSE, False), (NEITHER, None)], ids=str
)
def test_truth(texts: list[str], want: bool | None) -> None:  # noqa: FBT001
    """The words that vLLM's pydantic takes for a boolean."""
    assert [truth(text) for text in texts] == [want] * len(texts)


@pytest.mark.parametrize(
    ("body", "background", "stream", "store", "request_id"),
    [
        (b"{}", False, False, None, None),
        (b'{"background":true,"stream":true}', True, True, None, None),
        (b'{"background":"on","stream":1,"store":"off"}', True, True, False, None),
        (b'{"background":1.0,"stream":0,"store":1}', True, False, True, None),
        (b'{"background":2,"stream":"maybe","store":null}', False, False, None, None),
        (b'{"background":[true],"stream":{"a":true}}', False, False, None, None),
        (b'{"background":true,"background":false}', False, False, None, None),
        (b'{"background":false,"background":true}', True, False, None, None),
        (b'{"b\\u0061ckground":"tr\\u0075e"}', True, False, None, None),
        (b'{"x":{"background":true},"y":"\\"background\\":true"}', False, False, None, None),
        (b'{"background":true,"input":"\\ud800","request_id":"a"}', True, False, None, "a"),
        (b'{"request_id":"\\u0061","request_id":"b"}', False, False, None, "b"),
        (b'{"request_id":7}', False, False, None, None),
        (b' \n{ "background" : true } ', True, False, None, None),
    ],
)
def test_read_create(
    body: bytes,
    background: bool,  # noqa: FBT001
    stream: bool,  # noqa: FBT001
    store: bool | None,  # noqa: FBT001
    request_id: str | None,
) -> None:
    """Only the parsed top level counts; of repeated keys the last."""
    want = CreateRequest(background=background, stream=stream, store=store, request_id=request_id)
    assert read_create(body) == want


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"background"', b"{}x", b'{"a":"\xff"}'])
def test_what_is_no_create_request(body: bytes) -> None:
    """VLLM will say what is wrong with it."""
    assert read_create(body) is None


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (b'{"background":true}', b'{"stream":true}'),
        (b'{"background":true,"stream":true,"a":1}', b'{"stream":true,"a":1}'),
        (b'{"a":1,"stream":false,"background":true}', b'{"a":1,"stream":true}'),
        (b'{"a":1,"background":true,"b":2}', b'{"a":1,"b":2,"stream":true}'),
        (b'{"background":true,"a":1,"background":true}', b'{"a":1,"stream":true}'),
        (b'{"stream":1,"background":true,"stream":0}', b'{"stream":1,"stream":true}'),
        (
            b'{"b\\u0061ckground":true,"a":"\\u00e9\\ud800"}',
            b'{"a":"\\u00e9\\ud800","stream":true}',
        ),
        (
            b'{"a":{"background":true},"background":true}',
            b'{"a":{"background":true},"stream":true}',
        ),
        (
            b'{ "a" : 1.0 ,\n "background" : true ,\n "b":2 }',
            b'{ "a" : 1.0 ,\n "b":2 ,"stream":true}',
        ),
        (b'{"a":12345678901234567890.10}', b'{"a":12345678901234567890.10,"stream":true}'),
    ],
)
def test_to_foreground(body: bytes, want: bytes) -> None:
    """``background`` goes, ``stream`` is true, nothing else changes."""
    got = to_foreground(body)
    assert got.replace(b" ", b"") == want.replace(b" ", b"")
    told = json.loads(body) | {"stream": True}
    told.pop("background", None)
    assert json.loads(got) == told


def test_to_foreground_needs_an_object() -> None:
    """Anything else was refused before."""
    with pytest.raises(NotAnObjectError):
        to_foreground(b"[]")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
keys = st.sampled_from(["background", "stream", "a", 'b"', "é"])
space = st.sampled_from(["", " ", "\n", " \t"])


@given(st.lists(st.tuples(keys, values, space, space, space, space), max_size=6), space)
def test_every_other_byte_of_a_body_stays(
    members: list[tuple[str, Any, str, str, str, str]], lead: str
) -> None:
    """Written by hand without the member, the body is the same byte for byte."""

    def write(member: tuple[str, Any, str, str, str, str]) -> str:
        key, value, *spaces = member
        a, b, c, _ = spaces
        return f"{json.dumps(key)}{a}:{b}{json.dumps(value)}{c}"

    body = "{" + lead + ",".join(write(member) for member in members) + "}"
    got = to_foreground(body.encode())
    kept: list[Any] = [member for member in members if member[0] != "background"]
    streams = [place for place, member in enumerate(kept) if member[0] == "stream"]
    if streams:
        key, _, *spaces = kept[streams[-1]]
        kept[streams[-1]] = (key, True, *spaces)
    else:
        kept.append(("stream", True, "", "", "", ""))
    want = "{" + ",".join(write(member) for member in kept) + "}"

    def squeeze(text: str) -> str:
        for blank in " \t\n":
            text = text.replace(blank, "")
        return text

    assert squeeze(got.decode()) == squeeze(want)
    assert json.loads(got) == json.loads(want)


MARKED = [
    (b'{"response":{}}', b'{"response":{"background":true}}'),
    (b'{"response":{"id":"a"}}', b'{"response":{"background":true,"id":"a"}}'),
    (b'{"response": { "id":"a"}}', b'{"response": {"background":true, "id":"a"}}'),
    (b'{"response":{"background":false}}', b'{"response":{"background":true}}'),
    (b'{"response":{"a":1,"background" : null }}', b'{"response":{"a":1,"background" : true }}'),
    (b'{"response":{"background":true}}', b'{"response":{"background":true}}'),
    (b'{"r\\u0065sponse":{"a":1}}', b'{"r\\u0065sponse":{"background":true,"a":1}}'),
    (
        b'{"response":{"b\\u0061ckground":false}}',
        b'{"response":{"b\\u0061ckground":true}}',
    ),
    (
        b'{"response":{"background":false,"background":false}}',
        b'{"response":{"background":false,"background":true}}',
    ),
    (
        b'{"response":{"metadata":{"background":false}}}',
        b'{"response":{"background":true,"metadata":{"background":false}}}',
    ),
    (b'{"response":{"background":"no"}}', b'{"response":{"background":"no"}}'),
    (b'{"response":null}', b'{"response":null}'),
    (b'{"response":"{}"}', b'{"response":"{}"}'),
    (b'{"delta":"\\"response\\":{}"}', b'{"delta":"\\"response\\":{}"}'),
    (b'{"response":{"id":"a"}', b'{"response":{"id":"a"}'),
    (b"[DONE]", b"[DONE]"),
]


@pytest.mark.parametrize(("before", "after"), MARKED)
@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_mark_background(before: bytes, after: bytes, newline: bytes) -> None:
    """``background`` becomes true where it stands, or is the first member; nothing else changes."""
    frame = b"event: x%bdata:%%b%b%b" % (newline, newline, newline)
    assert mark_background(frame % before) == frame % after


def test_mark_background_in_data_of_several_lines() -> None:
    """An edit stays within its line."""
    block = b'data: {"response":\ndata: {\ndata: "id":"a",\ndata: "b":1}}\n\n'
    marked = mark_background(block)
    lines = [line.removeprefix(b"data: ") for line in marked.rstrip(b"\n").split(b"\n")]
    assert all(line.startswith(b"data: ") for line in marked.rstrip(b"\n").split(b"\n"))
    told = json.loads(b"\n".join(lines))
    assert list(told["response"].items()) == [("background", True), ("id", "a"), ("b", 1)]
    block = b'data: {"response":{"background":\ndata: false\ndata: }}\n\n'
    assert mark_background(block) == block.replace(b"false", b"true")


def test_mark_background_on_real_streams() -> None:
    """Every response object of every capture says true then, and only that has changed."""
    for capture in event_streams():
        for block in capture.events:
            marked = mark_background(block)
            if b'"response":{' not in block:
                assert marked == block
                continue
            for word in (b"true", b"false", b"null"):
                if b'"background":%b' % word in block:
                    assert marked == block.replace(
                        b'"background":%b' % word, b'"background":true', 1
                    )
            told = json.loads(marked.partition(b"data: ")[2])
            assert told["response"]["background"] is True


def test_as_queued() -> None:
    """What a create without stream answers: the object, queued."""
    before = json.dumps(response_object("in_progress")).encode()
    after = as_queued(before)
    assert after == before.replace(b'"in_progress"', b'"queued"')
    assert as_queued(b'{"id":"a"}') == b'{"id":"a","status":"queued"}'


@pytest.mark.parametrize(
    ("block", "number"),
    [
        (event("x", 0), 0),
        (event("x", 12345678901234567890), 12345678901234567890),
        (b'data: {"sequence_number":3,"sequence_number":4}\n\n', 4),
        (b'data: {"s\\u0065quence_number":3}\n\n', 3),
        (b'data: {"sequence_number":3,\ndata: "a":"\\ud800"}\r\n\r\n', 3),
        (b'data: {"sequence_number":null}\n\n', None),
        (b'data: {"sequence_number":"3"}\n\n', None),
        (b'data: {"sequence_number":true}\n\n', None),
        (b'data: {"sequence_number":3.5}\n\n', None),
        (b'data: {"a":{"sequence_number":3}}\n\n', None),
        (b'data: {"sequence_number":3\n\n', None),
        (b"data: sequence_number\n\n", None),
        (b": sequence_number\n\n", None),
        (b'data: {"sequence_number":1,"a":"\xff"}\n\n', None),
        (b"data: [DONE]\n\n", None),
        (b"\n", None),
    ],
)
def test_sequence_number(block: bytes, number: int | None) -> None:
    """The whole number at the parsed top level, or none."""
    assert sequence_number(block) == number


def test_sequence_numbers_of_a_stream() -> None:
    """As vLLM numbers them."""
    numbers = [sequence_number(block) for block in vllm_events(deltas=9)]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize(
    "block",
    [
        b'event: x\ndata: {"sequence_number":3}\n\n',
        b'event: x\ndata: {\ndata: "sequence_number":3}\n\n',
        b'event: x\ndata:{\ndata: "sequence_number":3}\n\n',
        b'event: x\rdata: {\ndata: "sequence_number":3}\n\n',
        b'event: x\nid: 4\ndata: {"sequence_number":3}\n\n',
        b'event: x\ndata: {"sequence_number":3}\nid: 4\n\n',
        b'event: x\ndatax: {"sequence_number":9}\ndata: {"sequence_number":3}\n\n',
        b'event: x\r\ndata: {"sequence_number":3}\r\n\r\n',
        b'data: {"sequence_number":3}\nevent: x\n\n',
    ],
)
def test_number_of_an_event_in_any_shape(block: bytes) -> None:
    """However an event is written down, its number is that of its whole data."""
    assert sequence_number(block) == 3
