"""One stream's life."""

from __future__ import annotations

import json
import random

import openai.types.responses as openai_types
import pytest
from openai._models import construct_type  # what openai's own Stream reads events with

from proxy.core.corrector import Corrector, Mode
from proxy.core.event import parse_event
from proxy.core.responses import read_payload
from tests.captures import Capture, corrected, event_streams, load
from tests.sse import cut, one_by_one

CREATED = (
    b'event: response.created\ndata: {"response":{"id":"r1","model":"m","status":"in_progress"},'
    b'"sequence_number":0,"type":"response.created"}\n\n'
)
DELTA = (
    b'event: response.output_text.delta\ndata: {"delta":"a","sequence_number":%d,'
    b'"type":"response.output_text.delta"}\n\n'
)
WRONG = (
    b'event: response.completed\ndata: {"response":{"id":"r1","model":"m","status":"incomplete"},'
    b'"sequence_number":3,"type":"response.completed"}\n\n'
)
RIGHT = WRONG.replace(b"response.completed", b"response.incomplete")
STREAM = CREATED + DELTA % 1 + DELTA % 2 + WRONG
DONE = b"data: [DONE]\n\n"


def run(chunks: list[bytes], **options: object) -> tuple[bytes, Corrector]:
    """Feed chunks to a new corrector and finish it."""
    corrector = Corrector(**options)  # type: ignore[arg-type]  # the tests' own keywords
    out = b"".join(map(corrector.feed, chunks)) + corrector.finish()
    return out, corrector


def expected(capture: Capture) -> bytes:
    """What a capture looks like downstream, made without the code under test."""
    return corrected(capture.body) if capture.is_truncated else capture.body


STREAMS = event_streams()
# One of each kind is cut at every single place; the others at random ones.
EVERY_CUT = [
    load("0.32.0", name)
    for name in (
        "a1_stream_truncated",
        "a2_stream_truncated_raw_chunked",
        "b1_stream_completed_schema",
        "c2_replay_truncated",
        "h1_reasoning_truncated_stream",
        "k7_lookalike_objects_truncated_stream",
        "p4_background_tool_replay",
    )
]


def _rest_kept(capture: Capture, out: bytes) -> None:
    """A stream that ends within an event loses that half event: no client dispatches it."""
    whole = expected(capture)
    if not whole.endswith(b"\n\n") and whole:
        whole = whole[: whole.rfind(b"\n\n") + 2]
    assert whole == out


@pytest.mark.parametrize("capture", STREAMS, ids=lambda capture: capture.id)
def test_every_capture(capture: Capture) -> None:
    """Every recorded stream differs from what came only as the rule says, however it is cut."""
    body = capture.body
    randomness = random.Random(capture.id)
    for chunks in (
        [body],
        capture.events,
        one_by_one(body) if len(body) < 4_500 else [body],
        *(
            cut(body, *randomness.sample(range(len(body) + 1), k=min(5, len(body))))
            for _ in range(6)
        ),
    ):
        out, corrector = run(chunks)

        _rest_kept(capture, out)
        assert corrector.corrected is capture.is_truncated


@pytest.mark.parametrize("capture", EVERY_CUT, ids=lambda capture: capture.id)
def test_capture_cut_at_every_place(capture: Capture) -> None:
    """A cut at any byte changes nothing, and no chunk comes out later than its event is whole."""
    body = capture.body
    for place in range(len(body)):
        out, _ = run([body[:place], body[place:]])

        assert expected(capture) == out


@pytest.mark.parametrize(
    "capture", [c for c in STREAMS if c.is_truncated], ids=lambda capture: capture.id
)
def test_corrected_event_is_openai_s_own(capture: Capture) -> None:
    """openai-python's own types read the corrected event as ResponseIncompleteEvent."""
    out, _ = run([capture.body])
    payload = json.loads(parse_event(out[out.rindex(b"event: response.incomplete") :]).payload())
    event = construct_type(type_=openai_types.ResponseStreamEvent, value=payload)

    assert isinstance(event, openai_types.ResponseIncompleteEvent)
    assert event.response.status == "incomplete"


def test_a_plain_event_is_not_copied() -> None:
    """A chunk that is one event of no further interest passes as the very object that came."""
    corrector = Corrector()
    corrector.feed(CREATED)
    chunk = DELTA % 1

    assert corrector.feed(chunk) is chunk
    assert corrector.events == 2


def test_what_was_seen() -> None:
    """The corrector tells id, model, numbers, status and the correction."""
    corrector = Corrector()
    nothing = (corrector.response_id, corrector.last_sequence_number)
    assert nothing == (None, None)
    corrector.feed(CREATED + DELTA % 1)
    seen = [corrector.response_id, corrector.model, corrector.status]
    assert seen == ["r1", "m", "in_progress"]
    corrector.feed(DELTA % 2 + b": comment\n\n")
    assert corrector.last_sequence_number == 2
    before = corrector.ended

    assert corrector.feed(WRONG) == RIGHT
    assert [before, corrector.ended] == [False, True]
    assert corrector.corrected
    assert corrector.status == "incomplete"
    assert corrector.last_sequence_number == 3
    assert corrector.events == 4  # the comment is none


@pytest.mark.parametrize("tail", [DONE, b": bye\n\n", b"\n\n", b"data: [DO", b": bye", b""])
def test_after_the_terminal_event(tail: bytes) -> None:
    """Done markers, comments and blank lines pass after the terminal event."""
    for chunks in ([STREAM + tail], [STREAM, tail], one_by_one(STREAM + tail)):
        out, corrector = run(chunks)

        kept = b"" if tail == b"data: [DO" else tail
        assert out == CREATED + DELTA % 1 + DELTA % 2 + RIGHT + kept
        assert corrector.done is (tail == DONE)


def test_nothing_else_comes_after_the_terminal_event() -> None:
    """A second terminal event, or any other event, is dropped and counted."""
    out, corrector = run([STREAM + DELTA % 4 + WRONG + DONE])

    assert out == CREATED + DELTA % 1 + DELTA % 2 + RIGHT + DONE
    assert corrector.dropped_events == 2


def test_lf_of_the_terminal_event_s_cr() -> None:
    """The LF that belongs to the terminal event's last CR passes."""
    stream = STREAM.replace(b"\n", b"\r\n")
    out, _ = run([stream[:-1], stream[-1:]])

    assert out == (CREATED + DELTA % 1 + DELTA % 2 + RIGHT).replace(b"\n", b"\r\n")


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_terminal_event_without_its_blank_line(line_end: bytes, missing: int) -> None:
    """At the end of the body a terminal event with whole JSON is completed."""
    stream = STREAM.replace(b"\n", line_end)
    right = (CREATED + DELTA % 1 + DELTA % 2 + RIGHT).replace(b"\n", line_end)
    short = stream[: len(stream) - missing * len(line_end)]
    out, corrector = run([short])

    assert corrector.corrected
    assert parse_event(out[len(right) - len(RIGHT.replace(b"\n", line_end)) :]).data
    if missing != 2 or line_end != b"\r\n":
        assert out == right.removesuffix(line_end * 2) + (
            line_end * 2 if missing < 2 or line_end == b"\n" else out[-2:]
        )
    again = Corrector()
    again.feed(out)
    assert again.ended


@pytest.mark.parametrize("half", [WRONG[:-10], DELTA % 3, b"data: [DONE]"])
def test_half_event_at_the_end_is_dropped(half: bytes) -> None:
    """A half event that is not a whole terminal one does not go out."""
    out, corrector = run([CREATED, half.rstrip(b"\n")])

    assert out == CREATED
    assert not corrector.ended


def test_observe_changes_nothing_and_sees_all() -> None:
    """Observed bytes pass as they came, chunk by chunk, halves and all."""
    tail = DONE + WRONG + b"data: ha"
    out, corrector = run(cut(STREAM + tail, 10, 500, 700), mode=Mode.OBSERVE)

    assert out == STREAM + tail
    assert corrector.corrected
    assert corrector.fail("x") == b""


def test_overlong_terminal_event_passes_uncorrected() -> None:
    """An event over the limit passes in parts; after it correction goes on."""
    long = WRONG.replace(b'"m"', b'"' + b"m" * 5_000 + b'"')
    for chunks in ([CREATED + long + WRONG], one_by_one(CREATED + long + WRONG)):
        out, corrector = run(chunks, max_event_bytes=1_000)

        assert out == CREATED + long + RIGHT
        assert corrector.overlong_events == 1


def test_ids_are_noticed() -> None:
    """An id field anywhere is seen, also in a chunk that is otherwise passed unread."""
    corrector = Corrector()
    corrector.feed(CREATED)
    assert not corrector.has_ids
    corrector.feed(b"data: x\nid: 7\n\n")
    assert corrector.has_ids


class TestFail:
    """The terminal event that the proxy writes itself."""

    def test_failure_is_the_last_response_with_another_status(self) -> None:
        """Every byte of the response is kept but status and error; the number goes on."""
        corrector = Corrector()
        corrector.feed(CREATED + DELTA % 1)
        out = corrector.feed(b"event: half") + corrector.fail("It broke.")

        assert out == (
            b'event: response.failed\ndata: {"response":{"id":"r1","model":"m","status":"failed",'
            b'"error":{"code":"server_error","message":"It broke."}},"sequence_number":2,'
            b'"type":"response.failed"}\n\n'
        )
        assert corrector.ended
        assert corrector.fail("again") == b""

    def test_nothing_can_fail_before_a_response_was_created(self) -> None:
        """Without response.created there is no response to fail."""
        corrector = Corrector()
        corrector.feed(DELTA % 1)
        assert corrector.fail("x") == b""
        assert not corrector.ended

    def test_failure_after_the_end(self) -> None:
        """A stream that has ended is not ended again."""
        _, corrector = run([STREAM])
        assert corrector.fail("x") == b""

    @pytest.mark.parametrize(
        ("event", "code", "message"),
        [
            (b'{"type":"error","code":"c","message":"m","sequence_number":1}', "c", "m"),
            (b'{"type":"error","error":{"code":"c","message":"m"}}', "c", "m"),
            (b'{"error":{"code":400,"message":"m","type":"t"}}', "server_error", "m"),
            (b'{"error":"words"}', "server_error", "words"),
            (b'{"type":"error"}', "server_error", "It broke."),
            (b'{"type":"error","error":null}', "server_error", "It broke."),
        ],
    )
    def test_upstream_s_own_error_tells(self, event: bytes, code: str, message: str) -> None:
        """After an error event its code and message say what happened; it is not terminal."""
        corrector = Corrector()
        block = b"event: error\ndata: " + event + b"\n\n"

        assert corrector.feed(CREATED + block) == CREATED + block
        assert not corrector.ended
        failure = parse_event(corrector.fail("It broke.")).payload()
        assert json.loads(failure)["response"]["error"] == {"code": code, "message": message}

    def test_half_an_overlong_event_does_not_swallow_the_failure(self) -> None:
        """A long event that went out in part is closed first."""
        corrector = Corrector(max_event_bytes=100)
        out = corrector.feed(CREATED[:90]) + corrector.feed(CREATED[90:])
        corrector = Corrector(max_event_bytes=500)
        out = corrector.feed(CREATED + b"data: " + b"x" * 1_000)
        failure = corrector.fail("It broke.")

        assert out.endswith(b"x")
        assert failure.startswith(b"\n\nevent: response.failed\n")

    @pytest.mark.parametrize("capture", STREAMS, ids=lambda capture: capture.id)
    def test_any_cut_of_a_capture_can_fail(self, capture: Capture) -> None:
        """Whatever was seen before, openai's types read the failure, numbered without a gap."""
        randomness = random.Random(capture.id)
        for _ in range(3):
            corrector = Corrector()
            corrector.feed(capture.body[: randomness.randrange(len(capture.body) + 1)])
            number = corrector.last_sequence_number
            failure = corrector.fail("It broke.")
            if corrector.response_id is None or not failure:
                continue
            payload = read_payload(parse_event(failure).payload())
            assert payload is not None
            assert number is not None
            assert payload.sequence_number == number + 1
            event = construct_type(
                type_=openai_types.ResponseStreamEvent,
                value=json.loads(parse_event(failure).payload()),
            )
            assert isinstance(event, openai_types.ResponseFailedEvent)
            assert event.response.error is not None
            assert event.response.error.message == "It broke."
