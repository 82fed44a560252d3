"""One member's place in a JSON text."""

from __future__ import annotations

import json

import msgspec
import pytest

from proxy.core.json_edit import (
    NotAnObjectError,
    decode_object,
    decode_string,
    member_spans,
    set_member,
)


def _values(text: bytes) -> dict[str, bytes]:
    return {key: text[begin:end] for key, (begin, end) in member_spans(text).items()}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        pytest.param(b"{}", {}, id="empty"),
        pytest.param(b' {\t"a" :\r\n1 , "b":[1, 2] }\n', {"a": b"1", "b": b"[1, 2]"}, id="spaces"),
        pytest.param(b'{"a":1,"a":12,"a":"x"}', {"a": b'"x"'}, id="the last of repeated keys"),
        pytest.param(b'{"a":12,"a":1}', {"a": b"1"}, id="a repeated key that begins alike"),
        pytest.param(
            b'{"a":{"q":"}]\\"","r":[{}]},"a":[1],"b":2}', {"a": b"[1]", "b": b"2"}, id="nested"
        ),
        pytest.param(b'{"a":"x\\"y","a":null}', {"a": b"null"}, id="escaped quote"),
        pytest.param(b'{"t\\u0079pe":"\\u0061"}', {"type": b'"\\u0061"'}, id="escapes"),
        pytest.param(
            b'{"n":123456789012345678901234567890.5e+10}',
            {"n": b"123456789012345678901234567890.5e+10"},
            id="big number",
        ),
        pytest.param('{"ä":"€"}'.encode(), {"ä": '"€"'.encode()}, id="UTF-8"),
        pytest.param(
            b'{"a":"\\ud800","b":"\\\\ud800"}',
            {"a": b'"\\ud800"', "b": b'"\\\\ud800"'},
            id="lone surrogate",
        ),
        pytest.param(b'{"a":true,"a":false}', {"a": b"false"}, id="scalars"),
    ],
)
def test_member_spans(text: bytes, values: dict[str, bytes]) -> None:
    """Each member's value is found, byte for byte, and of repeated keys the last."""
    assert values == _values(text)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"1",
        b'{"a":1',
        b'{"a":1,}',
        b'{"a":NaN}',
        b'{"a":01}',
        b'{"a":"\n"}',
        b'{"a":"\xff"}',
        b"{} {}",
        b"{'a':1}",
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_not_an_object(text: bytes) -> None:
    """What is not exactly one JSON object in UTF-8 is refused."""
    with pytest.raises(NotAnObjectError):
        member_spans(text)


def test_lone_surrogates_are_read() -> None:
    """As U+FFFD, and they move no byte; pairs of backslashes are no escapes."""
    value = rb'"\ud83d\ude00 \\ud800 \uDFFF \\\ud800 x"'
    text = b'{"a":%b,"b":1}' % value

    read = decode_object(msgspec.json.Decoder(dict[str, str | int]), text)
    assert read == {"a": "\U0001f600 \\ud800 \ufffd \\\ufffd x", "b": 1}
    assert _values(text) == {"a": value, "b": b"1"}


@pytest.mark.parametrize(
    "text", [b'{"a":"\xff"}', b"[]", b'{"a":1', b'{"a":"\\ud800}', b'{"a":[]}']
)
def test_what_is_not_asked_for_is_an_error(text: bytes) -> None:
    """No UTF-8, no object, no JSON, or a member of another kind."""
    with pytest.raises(NotAnObjectError):
        decode_object(msgspec.json.Decoder(dict[str, str]), text)


def test_decode_string() -> None:
    """Only a string is one."""
    assert decode_string(b'"a\\u0062"') == "ab"
    assert decode_string(b"1") is None


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        pytest.param(b'{"a": 1, "b" :2}', b'{"a": 1, "b" :"x"}', id="replaced"),
        pytest.param(b'{"b":1,"b":2}', b'{"b":1,"b":"x"}', id="the last of repeated keys"),
        pytest.param(b'{"a": 1 }\n', b'{"a": 1 ,"b":"x"}\n', id="added"),
        pytest.param(b"{ }", b'{ "b":"x"}', id="added to nothing"),
    ],
)
def test_set_member(text: bytes, edited: bytes) -> None:
    """One member changes and every other byte stays."""
    assert edited == set_member(text, "b", b'"x"')
    assert json.loads(edited)["b"] == "x"
