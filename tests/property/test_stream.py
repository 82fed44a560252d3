"""Identity when there is nothing to correct, exactly one change when there is."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.corrector import Corrector
from proxy.core.event import parse_event
from proxy.core.event_stream import EventStreamDecoder
from proxy.core.json_edit import NotAnObjectError, member_spans, set_member
from proxy.core.responses import judge

NAMES = {
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.failed",
    "completed": "response.completed",
}

line_ends = st.sampled_from(["\n", "\r\n", "\r"])
# The words of the rule appear in text, keys and values; so do separators that are no line ends.
words = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        [
            "response.completed",
            '"type":"response.completed"',
            "status",
            "type",
            "response",
            "\u2028",
            "\u2029",
            "\x85",
            "event: response.completed\n\n",
        ]
    ),
).filter(lambda text: text.isprintable() or max(text, default="") < "\ud800")
numbers = st.one_of(
    st.integers(),
    st.sampled_from([10**40, -(10**25)]),
    st.floats(allow_nan=False, allow_infinity=False),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=4,
)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@st.composite
def json_text(draw: st.DrawFn, value: object) -> str:
    """A JSON text of a value, with spaces, line ends and escapes as they happen to be."""
    ascii_only = draw(st.booleans())
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\n ")]))
    text = json.dumps(value, ensure_ascii=ascii_only, separators=separators)
    return text if _encodable(text) else json.dumps(value)


@st.composite
def objects(draw: st.DrawFn, members: dict[str, object]) -> str:
    """A JSON object of these members among others, in any order, some of them repeated before."""
    others = draw(st.dictionaries(words.filter(lambda key: key not in members), values, max_size=3))
    pairs: list[tuple[str, object]] = draw(st.permutations([*members.items(), *others.items()]))
    if draw(st.booleans()) and pairs:
        repeated = draw(st.sampled_from(sorted(key for key, _ in pairs)))
        pairs = [(repeated, draw(values)), *pairs]
    rendered = []
    for key, value in pairs:
        key_text = draw(json_text(key))
        if draw(st.booleans()):
            key_text = (
                '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 0x10000 else c for c in key) + '"'
            )
            key_text = key_text if _encodable(key_text) else json.dumps(key)
        value_text = value.text if isinstance(value, Ready) else draw(json_text(value))
        rendered.append(f"{key_text}{draw(st.sampled_from([':', ' : ']))}{value_text}")
    space = draw(st.sampled_from(["", " ", "\n"]))
    return "{" + space + (space + "," + space).join(rendered) + space + "}"


class Ready:
    """A JSON text that is a member's value as it is."""

    def __init__(self, text: str) -> None:
        self.text = text


def block(payload: str, name: str | None, *, line_end: str, spaced: bool, comment: bool) -> bytes:
    """Write an event over as many data lines as its payload has."""
    space = " " if spaced else ""
    lines = [f"data:{space}{line}" for line in payload.split("\n")]
    if not spaced and any(line.startswith("data: ") for line in lines):
        lines = [line.replace("data:", "data: ", 1) for line in lines]
    if name is not None:
        lines.insert(0, f"event:{space}{name}")
    if comment:
        lines.insert(len(lines) // 2, ": hb")
    return (line_end.join(lines) + line_end * 2).encode()


@st.composite
def harmless(draw: st.DrawFn) -> bytes:
    """A block that is no terminal event, though it may hold all the words of one."""
    kind = draw(st.sampled_from(["response.output_text.delta", "keepalive", "x"]))
    payload = draw(objects({"type": kind, "sequence_number": draw(st.integers(0, 99))}))
    event = block(
        payload,
        draw(st.sampled_from([kind, "response.completed", None])),
        line_end=draw(line_ends),
        spaced=draw(st.booleans()),
        comment=draw(st.booleans()),
    )
    return draw(
        st.sampled_from([event, b": comment\n\n", b"\n", b"id: 5\n\n", b"data: [DONE]\n\n"])
    )


@st.composite
def terminal(draw: st.DrawFn, status: str) -> tuple[bytes, bytes]:
    """A terminal event as vLLM might name it, and as it is to be sent."""
    response = draw(objects({"id": "r", "status": status}))
    name = draw(st.sampled_from(["response.completed", None, "other"]))
    marker = "\u0000TYPE\u0000"
    shape = draw(objects({"type": Ready(marker), "response": Ready(response)}))
    line_end = draw(line_ends)
    spaced, comment = draw(st.booleans()), draw(st.booleans())
    written = draw(
        st.sampled_from(
            ['"response.completed"', '"response\\u002ecompleted"', '"\\u0072esponse.completed"']
        )
    )
    right = NAMES[status]
    replacement = written if right == "response.completed" else f'"{right}"'
    out_name = right if name == "response.completed" else name
    look: dict[str, Any] = {"line_end": line_end, "spaced": spaced, "comment": comment}
    before = block(shape.replace(marker, written), name, **look)
    after = block(shape.replace(marker, replacement), out_name, **look)
    return before, after


@st.composite
def cuts(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The data, cut anywhere."""
    places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=6)))
    edges = [0, *places, len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_identity(data: st.DataObject) -> None:
    """A stream with nothing to correct leaves byte for byte as it came."""
    blocks = data.draw(st.lists(harmless(), max_size=5))
    stream = b"".join(blocks)
    corrector = Corrector()
    out = b"".join(map(corrector.feed, data.draw(cuts(stream))))

    assert out + corrector._decoder.take_rest() == stream


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(sorted(NAMES)))
def test_one_change(data: st.DataObject, status: str) -> None:
    """Exactly the terminal event changes, and in it exactly the values that name it."""
    lead = b"".join(data.draw(st.lists(harmless(), max_size=3)))
    before, after = data.draw(terminal(status))
    corrector = Corrector()
    # A lead that ends in CR must not join the terminal event's first line end.
    out = b"".join(map(corrector.feed, data.draw(cuts(lead + before))))

    assert out == lead + after
    assert corrector.ended
    assert corrector.corrected is (NAMES[status] != "response.completed")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.data())
def test_any_bytes(raw: bytes, data: st.DataObject) -> None:
    """Whatever comes, nothing breaks, nothing is lost, and the cutting makes no difference."""
    whole = EventStreamDecoder()
    blocks = b"".join(whole.feed(raw))
    parts = EventStreamDecoder()
    cut_blocks = b"".join(b"".join(parts.feed(chunk)) for chunk in data.draw(cuts(raw)))

    assert cut_blocks == blocks
    assert parts.take_rest() == whole.take_rest()
    judge(raw + b"\n\n")
    corrector = Corrector()
    corrector.feed(raw)
    corrector.finish()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_spans_agree_with_json(data: st.DataObject) -> None:
    """Every member is found where Python's own parser sees it, the last of repeated ones."""
    members = data.draw(st.dictionaries(words, values, max_size=4))
    text = data.draw(objects(dict(members)))
    raw = text.encode()
    parsed = json.loads(raw)
    spans = member_spans(raw)

    assert {key: json.loads(raw[a:b]) for key, (a, b) in spans.items()} == parsed
    edited = set_member(raw, "type", b'"new"')
    assert json.loads(edited) == {**parsed, "type": "new"}


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet='{}[]":,\\u0aet1 .-', max_size=30))
def test_what_is_taken_is_json(text: str) -> None:
    """Nothing is taken for an object that Python's parser refuses."""
    try:
        spans = member_spans(text.encode())
    except NotAnObjectError:
        return
    parsed = json.loads(text)
    assert spans.keys() == parsed.keys()


def test_parse_event_of_a_block_without_line_ends() -> None:
    """A block that is all one line is still read."""
    assert parse_event(b"data: x").payload() == b"x"
