"""The quick look at an event and the thorough one never disagree."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.corrector import Corrector, Mode
from proxy.core.event import parse_event
from proxy.core.event_stream import EventStreamDecoder
from proxy.core.plain_event import NO_NUMBER, plain_number
from proxy.core.responses import judge, read_payload
from tests.captures import Capture, event_streams

DELTA = (
    b'event: response.output_text.delta\ndata: {"delta":"%b","sequence_number":7,"type":"x"}\n\n'
)

types = st.sampled_from(
    ["response.output_text.delta", "response.completed", "response.failed", "error", "", 5, None]
)
members = st.fixed_dictionaries(
    {},
    optional={
        "delta": st.text(max_size=5),
        "type": types,
        "sequence_number": st.one_of(st.integers(), st.floats(), st.none(), st.text(max_size=2)),
        "response": st.sampled_from([{}, {"status": "incomplete"}, None, 1]),
        "error": st.sampled_from([{}, None, "x"]),
        "item": st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    },
)
junk = st.sampled_from(
    [
        b"\n",
        b"\r",
        b"\n\n",
        b"\xff",
        b"\\u0065",
        b"\\ud800",
        b'"',
        b"}",
        b"data: ",
        b"id: 1\n",
        b"\x00",
    ]
)


@st.composite
def blocks(draw: st.DrawFn) -> bytes:
    """An event as vLLM writes it, and sometimes with a byte or two where none belongs."""
    name = draw(st.sampled_from(["response.output_text.delta", "response.completed", ""]))
    text = json.dumps(draw(members), ensure_ascii=draw(st.booleans()), separators=(",", ":"))
    lead = draw(st.sampled_from(["event: ", "event:", "id: ", ": ", "eventx: "]))
    raw = f"{lead}{name}\ndata: {text}\n\n".encode("utf-8", "surrogatepass")
    for place in draw(st.lists(st.integers(0, len(raw)), max_size=2)):
        raw = raw[:place] + draw(junk) + raw[place:]
    return raw


@given(blocks())
def test_a_plain_event_is_nothing_else(block: bytes) -> None:
    """What the quick look passes is one event that the thorough one finds nothing in either."""
    number = plain_number(block)
    if number is None:
        return

    assert EventStreamDecoder(keep_bom=True).feed(block) == [block]
    assert judge(block) is None
    event = parse_event(block)
    assert event.data
    assert not event.has_id
    payload = read_payload(event.payload())
    assert payload is not None
    assert payload.type not in {None, "error", "response.output_item.done"}
    assert not payload.has_response
    assert payload.error is None or bytes(payload.error) == b"null"
    assert payload.sequence_number == (None if number == NO_NUMBER else number)


CREATED = (
    b'event: response.created\ndata: {"response":{"id":"resp_1","status":"in_progress"},'
    b'"sequence_number":0,"type":"response.created"}\n\n'
)


def in_chunk(block: bytes) -> bytes:
    """Frame a block as servers do."""
    return b"%x\r\n%b\r\n" % (len(block), block)


def seen(corrector: Corrector) -> tuple[object, ...]:
    """Tell what a corrector knows."""
    return (
        corrector.events,
        corrector.last_sequence_number,
        corrector.terminal,
        corrector.has_ids,
        corrector.done,
        corrector.dropped_events,
        corrector.response,
    )


@settings(max_examples=300)
@given(
    st.lists(st.one_of(blocks(), st.sampled_from([DELTA % b"a", DELTA % b"\xc3\xa9"])), max_size=6),
    st.sampled_from([Mode.ON, Mode.OBSERVE]),
)
def test_the_way_of_a_chunk_does_not_matter(stream: list[bytes], mode: Mode) -> None:
    """Taken with its HTTP framing or fed as body: the same is sent, the same is known."""
    framed, fed = Corrector(mode), Corrector(mode)
    for block in (CREATED, DELTA % b"b", *stream, DELTA % b"c"):
        sent = fed.feed(block)
        if size := framed.take_http_chunk(in_chunk(block)):
            assert (size, block) == (len(block), sent)
        else:
            assert framed.feed(block) == sent
        assert seen(framed) == seen(fed)


@pytest.mark.parametrize(
    ("block", "taken"),
    [
        (DELTA % b"a", True),
        (DELTA % b"\xff", False),
        (DELTA.replace(b"{", b"{\n") % b"a", False),
        (DELTA.replace(b"{", b"{\r") % b"a", False),
        (DELTA.replace(b'"x"', b'""') % b"ab", False),
        (DELTA.replace(b'"type":"x"', b'"type":[]') % b"ab", False),
        (DELTA.replace(b"output_text", b"output_next") % b"a", False),
        (DELTA.replace(b'"sequence_number":7,', b'"sequence_numbe_":7,') % b"a", False),
        ((DELTA % b"aa")[:-1], False),
        (DELTA.replace(b"delta\ndata", b"delta\rdata") % b"a", False),
    ],
)
def test_which_chunks_are_taken_as_they_are(block: bytes, taken: bool) -> None:  # noqa: FBT001
    """One whole plain event with a number, of a name and a length that was seen before."""
    corrector = Corrector()
    corrector.feed(CREATED)
    for delta in (b"a", b"ab", b"abc"):
        corrector.take_http_chunk(in_chunk(DELTA % delta))
    events = corrector.events
    assert bool(corrector.take_http_chunk(in_chunk(block))) is taken
    assert corrector.events == events + taken


@pytest.mark.parametrize(
    ("lead", "taken"),
    [
        (b"event: response.output_text.delta\ndata: ", True),
        (b"event: response.reasoning_text.delta\ndata: ", True),
        (b"event: output_next.delta\ndata: ", True),
        (b"event: \ndata: ", True),
        (b"event: a\rid: 5\ndata: ", False),
        (b"event: a\nid: 5\ndata: ", False),
        (b"id: 5\ndata: ", False),
        (b"data: ", False),
        (b"event: " + b"a" * 128 + b"\ndata: ", False),
    ],
)
def test_which_events_are_learned(lead: bytes, taken: bool) -> None:  # noqa: FBT001
    """The second of a name and a length is known, also after others; more fields are not."""
    corrector = Corrector()
    corrector.feed(CREATED)
    other = DELTA.replace(b"response.", b"") % b"a"
    raw = lead + other.partition(b"data: ")[2]
    assert corrector.take_http_chunk(in_chunk(other)) == 0
    assert corrector.take_http_chunk(in_chunk(other)) == len(other)
    assert corrector.take_http_chunk(in_chunk(raw)) == 0
    assert bool(corrector.take_http_chunk(in_chunk(raw))) is taken


def test_chunks_are_not_taken_within_an_event_or_behind_the_end() -> None:
    """Where half an event waits, and after the terminal event, all goes the long way."""
    corrector = Corrector()
    delta = DELTA % b"a"
    assert corrector.take_http_chunk(in_chunk(delta)) == 0  # the start, where a BOM may stand
    corrector.feed(CREATED + delta)
    corrector.take_http_chunk(in_chunk(delta))
    assert corrector.take_http_chunk(in_chunk(delta)) == len(delta)
    corrector.feed(b"id: 1\n")
    assert corrector.take_http_chunk(in_chunk(delta)) == 0
    corrector.feed(delta)
    assert corrector.take_http_chunk(in_chunk(delta)) == len(delta)
    corrector.fail("lost")
    assert corrector.take_http_chunk(in_chunk(delta)) == 0


def test_chunks_of_events_longer_than_allowed_are_not_taken() -> None:
    """A limit below the length of a delta holds for deltas too."""
    corrector = Corrector(max_event_bytes=80)
    delta = DELTA % b"a"
    corrector.feed(CREATED)
    for _ in range(3):
        assert corrector.take_http_chunk(in_chunk(delta)) == 0
    corrector.feed(delta)
    assert corrector.overlong_events == 2


@pytest.mark.parametrize(
    ("block", "number"),
    [
        (DELTA % b"a", 7),
        (DELTA % "\u00e9\u2028".encode(), 7),
        (DELTA % b'\\"response\\":{}, error', 7),
        (DELTA.replace(b'"sequence_number":7,', b"") % b"a", NO_NUMBER),
        (DELTA % b"\xff", None),
        (DELTA % b"\\ud800", None),
        (DELTA % b"a" + DELTA % b"b", None),
        (DELTA % b"a" + b"\n", None),
        ((DELTA % b"a")[:-1], None),
        (b"id: 1\n" + DELTA % b"a", None),
        (DELTA.replace(b"\n", b"\nid: 1\n", 1) % b"a", None),
        (DELTA.replace(b"\n", b"\rid: 1\n", 1) % b"a", None),
        (DELTA.replace(b"{", b"{\r") % b"a", None),
        (DELTA.replace(b"event: ", b"event:") % b"a", None),
        (DELTA.replace(b"data: ", b"data:") % b"a", None),
        (DELTA.replace(b"\n", b"\r\n") % b"a", None),
        (DELTA.replace(b'"x"', b'"error"') % b"a", None),
        (DELTA.replace(b'"x"', b'"response.completed"') % b"a", None),
        (DELTA.replace(b'"x"', b'"\\u0065rror"') % b"a", None),
        (DELTA.replace(b'"delta"', b'"response"') % b"a", None),
        (DELTA.replace(b'"delta"', b'"\\u0065rror"') % b"a", None),
        (DELTA.replace(b',"type":"x"', b"") % b"a", None),
        (b"data: [DONE]\n\n", None),
        (b": comment\n\n", None),
        (b"", None),
    ],
)
def test_what_is_plain(block: bytes, number: int | None) -> None:
    """The shape that vLLM writes, and nothing that tells of the response."""
    assert plain_number(block) == number


@pytest.mark.parametrize("capture", event_streams(), ids=lambda capture: capture.id)
def test_most_of_what_vllm_sends_is_plain(capture: Capture) -> None:
    """All but the response's own events, errors and finished items."""
    for block in capture.events:
        payload = read_payload(parse_event(block).payload())
        if payload is None or not block.endswith(b"\n\n"):
            continue
        tells = (
            payload.has_response
            or payload.type in {None, "error", "response.output_item.done"}
            or (payload.error is not None and bytes(payload.error) != b"null")
        )
        assert (plain_number(block) is None) is tells
