"""The terminal rule, row by row."""

from __future__ import annotations

import pytest

from proxy.core.responses import judge, may_be_terminal, read_payload

COMPLETED = "response.completed"


def _event(name: str | None, payload: str) -> bytes:
    return (
        f"event: {name}\n" if name is not None else ""
    ).encode() + f"data: {payload}\n\n".encode()


def _payload(kind: str, status: str) -> str:
    return f'{{"response":{{"id":"r","status":"{status}"}},"sequence_number":4,"type":"{kind}"}}'


@pytest.mark.parametrize(
    ("says", "status", "sent_as", "contradiction"),
    [
        (COMPLETED, "completed", COMPLETED, False),
        (COMPLETED, "incomplete", "response.incomplete", False),
        (COMPLETED, "failed", "response.failed", False),
        (COMPLETED, "cancelled", "response.failed", False),
        (COMPLETED, "queued", COMPLETED, True),
        (COMPLETED, "in_progress", COMPLETED, True),
        (COMPLETED, "", COMPLETED, True),
        ("response.incomplete", "completed", "response.incomplete", False),
        ("response.failed", "completed", "response.failed", False),
        ("response.failed", "cancelled", "response.failed", False),
    ],
)
def test_rule(says: str, status: str, sent_as: str, contradiction: bool) -> None:  # noqa: FBT001 - a table
    """The event is sent under the name that the status asks for, with nothing else changed."""
    block = _event(says, _payload(says, status))
    terminal = judge(block)

    assert terminal is not None
    assert (terminal.says, terminal.name, terminal.contradiction) == (says, sent_as, contradiction)
    assert terminal.raw == _event(sent_as, _payload(sent_as, status))
    assert terminal.corrected is (says != sent_as)


@pytest.mark.parametrize(
    ("block", "corrected"),
    [
        pytest.param(
            _event(None, _payload(COMPLETED, "incomplete")),
            _event(None, _payload("response.incomplete", "incomplete")),
            id="no event field: the type tells",
        ),
        pytest.param(
            _event(COMPLETED, '{"response":{"status":"incomplete"}}'),
            _event("response.incomplete", '{"response":{"status":"incomplete"}}'),
            id="no type: the event field tells",
        ),
        pytest.param(
            _event(COMPLETED, '{"type":null,"response":{"status":"incomplete"}}'),
            _event("response.incomplete", '{"type":null,"response":{"status":"incomplete"}}'),
            id="a type that is no string is none",
        ),
        pytest.param(
            _event("other", _payload(COMPLETED, "incomplete")),
            _event("other", _payload("response.incomplete", "incomplete")),
            id="the event field says something else and is left",
        ),
        pytest.param(
            b'event: x\nevent: response.completed\ndata: {"response":{"status":"failed"}}\n\n',
            b'event: x\nevent: response.failed\ndata: {"response":{"status":"failed"}}\n\n',
            id="the last event field counts",
        ),
        pytest.param(
            b'event:response.completed\r\ndata:{ "type" : "response\\u002ecompleted" ,\r\n: hb\r\n'
            b'data: "response": {"status": "incom\\u0070lete"} }\r\nid: 3\r\n\r\n',
            b'event:response.incomplete\r\ndata:{ "type" : "response.incomplete" ,\r\n: hb\r\n'
            b'data: "response": {"status": "incom\\u0070lete"} }\r\nid: 3\r\n\r\n',
            id="several lines, CRLF, escapes, a comment inside",
        ),
        pytest.param(
            b'data: {"type":"response.completed","type":"response.completed","response":'
            b'{"status":"completed","status":"incomplete"}}\n\n',
            b'data: {"type":"response.completed","type":"response.incomplete","response":'
            b'{"status":"completed","status":"incomplete"}}\n\n',
            id="of repeated keys the last counts",
        ),
        pytest.param(
            b'data: {"metadata":{"type":"response.completed"},"response":{"text":"\\ud800",'
            b'"status":"incomplete"},"type":"response.completed"}\r\r',
            b'data: {"metadata":{"type":"response.completed"},"response":{"text":"\\ud800",'
            b'"status":"incomplete"},"type":"response.incomplete"}\r\r',
            id="lookalikes, a lone surrogate, CR",
        ),
    ],
)
def test_correction_keeps_every_other_byte(block: bytes, corrected: bytes) -> None:
    """Only the values that say response.completed change, in both places where they count."""
    terminal = judge(block)

    assert terminal is not None
    assert corrected == terminal.raw
    assert terminal.corrected


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            _event(COMPLETED, '{"type":"response.output_text.delta"}'), id="the type wins"
        ),
        pytest.param(_event("x", '{"response":{"type":"response.completed"}}'), id="nested"),
        pytest.param(b"event: response.completed\n\n", id="no data: nothing is dispatched"),
        pytest.param(b": response.completed\n\n", id="a comment"),
        pytest.param(b"data: [DONE]\n\n", id="done"),
        pytest.param(_event("keepalive", '{"type":"keepalive"}'), id="keepalive"),
    ],
)
def test_not_terminal(block: bytes) -> None:
    """Only the top level's type, or without one the event's name, makes an event terminal."""
    assert judge(block) is None


@pytest.mark.parametrize(
    "payload",
    ["", "{", "[]", "[1]", '{"response":1}', '{"a":NaN}', '{"response":{"status":5}}', "\\"],
)
def test_completed_without_a_usable_payload_is_a_contradiction(payload: str) -> None:
    """What says completed and cannot be checked passes untouched and is told of."""
    block = _event(COMPLETED, payload)
    terminal = judge(block)

    assert terminal is not None
    assert terminal.contradiction
    assert terminal.raw == block


def test_invalid_utf8_is_a_contradiction() -> None:
    """A payload that is not UTF-8 is not judged, whatever it seems to say."""
    block = b'event: response.completed\ndata: {"response":{"status":"incomplete","x":"\xff"}}\n\n'
    terminal = judge(block)

    assert terminal is not None
    assert terminal.contradiction
    assert terminal.raw == block


def test_prefilter_lets_every_terminal_event_through() -> None:
    """An event whose name is spelled with escapes is not overlooked."""
    assert may_be_terminal(b'data: {"type":"response\\u002ecompleted"}\n\n')
    assert may_be_terminal(b"event: response.failed\n")
    assert not may_be_terminal(b'data: {"type":"response.output_text.delta","delta":"\\n"}\n\n')


def test_read_payload() -> None:
    """What a relay asks for is read, and a wrong kind of value is none."""
    payload = read_payload(
        b'{"type":"x","sequence_number":7,"response":{"id":"r","model":"m","status":"s"},"code":1}'
    )

    assert payload is not None
    assert (payload.type, payload.sequence_number, payload.code) == ("x", 7, None)
    assert (payload.response_id, payload.model, payload.status) == ("r", "m", "s")
    wrong = read_payload(b'{"sequence_number":"7","response":[1]}')
    assert wrong is not None
    assert wrong.sequence_number is None
    assert not wrong.has_response
