"""What `lastword check` makes of real streams, of its options and of its findings."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from proxy.core.responses import judge
from proxy.tools.check import questions
from proxy.tools.check.options import make_options
from proxy.tools.check.report import (
    Answer,
    Asked,
    CheckError,
    NotApplicableError,
    NotAskedError,
    Report,
    Verdict,
    fault,
    fine,
    printable,
)
from proxy.tools.check.stream_rules import RULES, ToldStream
from proxy.tools.check.table import print_report
from tests.captures import load
from tests.fake_scripts import event, response_object, vllm_events

if TYPE_CHECKING:
    from proxy.tools.check.report import Question

USAGE_AND_ITEM = {questions.USAGE, questions.ITEM_STATUS}
UNDONE = {questions.USAGE, questions.DONE_EVENTS}
ODD_INDEX = {questions.CONTENT_INDEX}
OLD = {questions.USAGE, questions.TRUNCATED_STATUS, questions.LAST_OUTPUT, *ODD_INDEX}


def told(blocks: list[bytes], max_output_tokens: int = 16) -> ToldStream:
    """Give a stream as the rules take it."""
    terminal = judge(blocks[-1])
    assert terminal is not None
    return ToldStream(blocks, terminal, max_output_tokens, ignores_eos=True)


def faults(stream: ToldStream) -> set[Question]:
    """Give the rules that a stream breaks."""
    found = set()
    for question, rule in RULES.items():
        try:
            if rule(stream).verdict is Verdict.FAULT:
                found.add(question)
        except (NotApplicableError, NotAskedError):
            continue
    return found


@pytest.mark.parametrize(
    ("version", "name", "expected"),
    [
        ("0.11.2", "a1_stream_truncated", OLD | {questions.ITEM_IDS}),
        ("0.14.0", "a1_stream_truncated", USAGE_AND_ITEM | ODD_INDEX | {questions.ITEM_IDS}),
        ("0.16.0", "a1_stream_truncated", USAGE_AND_ITEM | ODD_INDEX | {questions.ITEM_IDS}),
        ("0.20.0", "a1_stream_truncated", USAGE_AND_ITEM | {questions.ITEM_IDS}),
        ("0.22.0", "a1_stream_truncated", USAGE_AND_ITEM | {questions.ITEM_IDS}),
        ("0.30.0", "a1_stream_truncated", USAGE_AND_ITEM | {questions.ITEM_IDS}),
        ("0.32.0", "a1_stream_truncated", USAGE_AND_ITEM),
        ("0.32.0", "h1_reasoning_truncated_stream", USAGE_AND_ITEM),
        ("0.20.0", "b1_stream_completed_schema", UNDONE | {questions.ITEM_IDS}),
    ],
)
def test_what_real_streams_get_wrong(version: str, name: str, expected: set[Question]) -> None:
    """The faults of each version, as they were seen on it."""
    capture = load(version, name)
    assert isinstance(capture.request_body, dict)
    limit = capture.request_body["max_output_tokens"]
    assert faults(told(capture.events, limit)) == expected


def reasoning(part: str) -> list[bytes]:
    """Make the events of a reasoning part, under the names that a vLLM gives them."""
    place = {"output_index": 0, "content_index": 0}
    last = response_object("incomplete", output=[])
    kinds: list[tuple[str, dict[str, Any]]] = [
        (f"response.{part}.added", place),
        ("response.reasoning_text.delta", place),
        ("response.reasoning_text.done", place),
        (f"response.{part}.done", place),
        ("response.completed", {"response": last}),
    ]
    return [event(kind, number, **members) for number, (kind, members) in enumerate(kinds)]


def test_reasoning_parts() -> None:
    """The events of a reasoning part are named as those of any other part."""
    assert faults(told(reasoning("reasoning_part"))) == {questions.REASONING_EVENTS}
    assert faults(told(reasoning("content_part"))) == set()


def test_numbers_and_names() -> None:
    """Numbers count from 0 without a gap; a name is the type."""
    events = vllm_events()
    number = RULES[questions.NUMBERS]
    assert number(told(events)).verdict is Verdict.OK
    assert number(told(events[1:])) == fault("event 0 has the number 1")
    renamed = events[0].replace(b"event: response.created", b"event: ping")
    assert number(told([renamed, *events[1:]])) == fault("event 0 has another name than type")
    assert number(told([b"data: {\n\n", *events[1:]])) == fault("event 0 is no JSON object")


@pytest.mark.parametrize(
    "payload",
    [
        b"[]",
        b'{"type":"response.completed"}',
        b'{"type":"response.completed","response":[]}',
        b'{"type":"response.completed","response":{"output":5,"usage":"none"}}',
        b'{"type":"response.completed","response":{"output":[{"id":[]}],"status":7}}',
        b'{"type":"response.completed","response":{"usage":{"input_tokens_details":[]}}}',
        b'{"type":"response.completed","response":null,"output_index":"a","item":3}',
    ],
)
def test_garbage_breaks_no_rule(payload: bytes) -> None:
    """Whatever a last event holds, a rule has an answer or a reason why it has none."""
    stream = told([b"event: response.completed\ndata: %b\n\n" % payload])
    assert faults(stream) <= {questions.NUMBERS}


def test_options() -> None:
    """An address may come as clients write it, with /v1; a header counts over the key."""
    options = make_options(
        "http://127.0.0.1:8000/v1/",
        "https://proxy/team",
        model=None,
        api_key="secret",
        headers=["X-Team: search", "authorization:Basic abc"],
        ca_file=None,
        timeout_s=5,
    )
    assert (options.url, options.through) == ("http://127.0.0.1:8000", "https://proxy/team")
    assert dict(options.headers) == {"authorization": "Basic abc", "x-team": "search"}


@pytest.mark.parametrize(
    ("url", "header", "said"),
    [
        ("127.0.0.1:8000", "a: b", "URL must be http"),
        ("http://user:word@host", "a: b", "URL must be http"),
        ("http://host", "secret", "'NAME: VALUE'"),
        ("http://host", "a: b\r\nc: d", "'NAME: VALUE'"),
        ("http://host", "n\u00e4me: b", "'NAME: VALUE'"),
    ],
)
def test_wrong_options(url: str, header: str, said: str) -> None:
    """What cannot be is a sentence that says what can, without repeating a secret."""
    with pytest.raises(CheckError, match=said) as caught:
        make_options(url, model=None, api_key=None, headers=[header], ca_file=None, timeout_s=5)
    assert not any(secret in str(caught.value) for secret in ("word", "secret"))


def test_key_that_fits_no_header() -> None:
    """A key's line end is dropped, as files have one; one within it is refused unshown."""
    wrong = pytest.raises(CheckError, match="--api-key")
    rest: dict[str, Any] = {"model": None, "headers": [], "ca_file": None, "timeout_s": 5}
    options = make_options("http://host", api_key="secret\n", **rest)
    assert options.headers["authorization"] == "Bearer secret"
    with wrong as caught:
        make_options("http://host", api_key="sec\nret", **rest)
    assert "ret" not in str(caught.value)


def report(server: dict[Question, Answer], through: dict[Question, Answer] | None = None) -> Report:
    """Make a report in which what is not said is fine."""
    asked = [
        Asked(url, "0.32.0", "tiny", dict.fromkeys(questions.ALL, fine("yes")) | answers)
        for url, answers in (("http://vllm", server), ("http://proxy", through))
        if answers is not None
    ]
    return Report(*asked)


WRONG = fault("response.completed, status incomplete")
UNASKED = Answer(Verdict.NOT_ASKED, "busy")
ABSENT = Answer(Verdict.NOT_APPLICABLE, "its store is off")


@pytest.mark.parametrize(
    ("server", "through", "status"),
    [
        pytest.param({}, None, 0, id="all is fine"),
        pytest.param({questions.REPLAY: ABSENT}, None, 0, id="not applicable"),
        pytest.param({questions.TRUNCATED: WRONG}, None, 1, id="a fault"),
        pytest.param({questions.USAGE: WRONG}, None, 0, id="one that is left"),
        pytest.param({questions.REPLAY: UNASKED}, None, 3, id="not asked"),
        pytest.param({questions.REPLAY: UNASKED, questions.TRUNCATED: WRONG}, None, 1, id="both"),
        pytest.param({questions.TRUNCATED: WRONG}, {}, 0, id="fine through the proxy"),
        pytest.param({}, {questions.TRUNCATED: WRONG}, 1, id="a fault through the proxy"),
        pytest.param({}, {questions.REPLAY: UNASKED}, 3, id="not asked through the proxy"),
    ],
)
def test_exit_status(
    server: dict[Question, Answer], through: dict[Question, Answer] | None, status: int
) -> None:
    """0 only if everything that makes sense was asked and Lastword has nothing to correct."""
    assert report(server, through).exit_status == status


def test_table_needs_neither_colour_nor_width() -> None:
    """In a pipe of 80 columns the table is plain text, whole and with its verdicts in words."""
    out = io.StringIO()
    answers = {questions.TRUNCATED: WRONG, questions.REPLAY: ABSENT, questions.USAGE: UNASKED}
    print_report(Console(file=out, width=80, highlight=False), report(answers))
    shown = out.getvalue()
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert "\x1b" not in shown
    for words in ("FAULT", "NOT ASKED: busy", "vllm#59324", "response.incomplete", " ok"):
        assert words in shown
    assert "Not applicable (its store is off): background: replay." in shown
    assert "Lastword corrects 1 fault of this server." in shown


def test_table_with_a_proxy() -> None:
    """What came through the proxy is shown as measured, with a hint where it is wrong."""
    out = io.StringIO()
    late = {questions.BACKGROUND_LATE_ERROR: fault("stays open")}
    console = Console(file=out, width=200, highlight=False)
    print_report(console, report({questions.TRUNCATED: WRONG} | late, late))
    shown = out.getvalue()
    assert "through http://proxy (vLLM 0.32.0), model tiny" in shown
    assert "FAULT: stays open" in shown
    assert "only with --background proxy" in shown
    assert "1 fault that Lastword can correct came through http://proxy" in shown


def test_what_a_server_says_is_safe_to_print() -> None:
    """No server moves the cursor of a terminal, or fills it."""
    assert printable("a\x1b[2J\r\nb\u202e") == "a [2J b"
    assert len(printable("x" * 10_000)) < 400
