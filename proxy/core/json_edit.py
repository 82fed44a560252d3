"""Replace one member of a JSON text and keep every other byte.

A payload may be 16 MB of logprobs, so no Python objects are built from it: msgspec checks
the grammar and cuts the top level into raw members (``msgspec.Raw``), and the lengths of
these say where each member stands.  Of repeated keys the last one counts, as JSON parsers
have it (RFC 8259, section 4, leaves it open; every client reads it so).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "NotAnObjectError",
    "decode_object",
    "decode_string",
    "member_spans",
    "remove_member",
    "set_member",
]

T = TypeVar("T")

_WHITESPACE = re.compile(rb"[ \t\r\n]*")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[^,\]} \t\r\n]+")
_STRUCTURE = re.compile(rb'["{}\[\]]')
# A pair of surrogates, one alone, or any other escape.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|u[dD][89a-fA-F][0-9a-fA-F]{2}|.)",
    re.DOTALL,
)
_LONE_SURROGATE_LENGTH = 6
_QUOTE, _COMMA, _CLOSE = b'",}'
_raw_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_string = msgspec.json.Decoder(str)


class NotAnObjectError(ValueError):
    """The text is not one JSON object in UTF-8."""


def decode_object(decoder: msgspec.json.Decoder[T], text: bytes) -> T:
    """Return what ``decoder`` reads in one JSON object.

    Escaped lone surrogates, which JSON's grammar allows and the clients take, read as U+FFFD.
    Raises ``NotAnObjectError`` if the text is not UTF-8, not JSON, or not what the decoder's type
    asks for.
    """
    return _decode(decoder, text)[0]


def _decode(decoder: msgspec.json.Decoder[T], text: bytes) -> tuple[T, bytes]:
    """Return what ``decoder`` reads, and the text that it read: as long, maybe masked."""
    if not text.isascii():
        try:
            text.decode()  # msgspec does not look into the strings that it skips
        except UnicodeDecodeError as error:
            raise NotAnObjectError("the text is not UTF-8") from error
    try:
        return decoder.decode(text), text
    except (msgspec.MsgspecError, RecursionError) as error:
        # It may have been a lone surrogate. To look for one first would cost as much as to decode.
        if b"\\ud" not in text and b"\\uD" not in text:
            raise NotAnObjectError(f"the text is not what it should be: {error}") from error
    masked = _ESCAPE.sub(_mask_lone_surrogate, text)
    try:
        return decoder.decode(masked), masked
    except (msgspec.MsgspecError, RecursionError) as error:
        raise NotAnObjectError(f"the text is not what it should be: {error}") from error


def _mask_lone_surrogate(match: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if len(match[0]) == _LONE_SURROGATE_LENGTH else match[0]


def decode_string(text: bytes | memoryview | msgspec.Raw) -> str | None:
    """Return the string that a JSON value is, or None if it is something else."""
    try:
        return _string.decode(text)
    except msgspec.MsgspecError:
        return None


def member_spans(text: bytes) -> dict[str, tuple[int, int]]:
    """Tell where the value of each member of a JSON object begins and ends.

    Of a repeated key the last member's span is given.  Raises ``NotAnObjectError`` if the
    text is not exactly one JSON object.
    """
    return {key: (begin, end) for key, _, begin, end in _walk(text)}


def set_member(text: bytes, key: str, value: bytes, *, first: bool = False) -> bytes:
    """Return the object with the member's value replaced, or with the member added.

    A new member comes at the object's end, or ``first``.  ``value`` is JSON text.  Raises
    ``NotAnObjectError`` if the text is no JSON object.
    """
    spans = member_spans(text)
    if key in spans:
        begin, end = spans[key]
        return text[:begin] + value + text[end:]
    name = msgspec.json.encode(key)
    comma = b"," if spans else b""
    if first:
        place = text.index(b"{") + 1
        return b"%b%b:%b%b%b" % (text[:place], name, value, comma, text[place:])
    place = text.rindex(b"}")
    return b"%b%b%b:%b%b" % (text[:place], comma, name, value, text[place:])


def remove_member(text: bytes, key: str) -> bytes:
    """Return the object without any member of this key; every other byte is kept.

    With a member goes the comma behind it, or the one before the last.  Raises
    ``NotAnObjectError`` if the text is no JSON object.
    """
    members = list(_walk(text))
    kept = [place for place, (name, *_) in enumerate(members) if name != key]
    if len(kept) == len(members):
        return text
    if not kept:
        return text[: members[0][1]] + text[members[-1][3] :]
    pieces = [text[: members[0][1]]]
    for place in kept:
        begin = members[place][1]
        last = place == kept[-1]
        end = members[place][3] if last else members[place + 1][1]
        pieces.append(text[begin:end])
    pieces.append(text[members[-1][3] :])
    return b"".join(pieces)


def _walk(text: bytes) -> Iterator[tuple[str, int, int, int]]:
    """Yield each member's key, where it begins, and where its value begins and ends."""
    members, text = _decode(_raw_members, text)
    position = _skip_whitespace(text, _skip_whitespace(text, 0) + 1)
    while text[position] != _CLOSE:
        key_end = _end_of_string(text, position)
        key = _string.decode(memoryview(text)[position:key_end])
        begin = _skip_whitespace(text, _skip_whitespace(text, key_end) + 1)
        end = _end_of_value(text, begin, members[key])
        yield key, position, begin, end
        position = _skip_whitespace(text, end)
        if text[position] == _COMMA:
            position = _skip_whitespace(text, position + 1)


def _skip_whitespace(text: bytes, position: int) -> int:
    match = _WHITESPACE.match(text, position)
    return match.end() if match else position


def _end_of_string(text: bytes, begin: int) -> int:
    match = _STRING.match(text, begin)
    if match is None:  # pragma: no cover - the grammar was checked before
        raise NotAnObjectError("a string has no end")
    return match.end()


def _end_of_value(text: bytes, begin: int, raw: msgspec.Raw) -> int:
    """Tell where the value at ``begin`` ends, which ``raw`` is unless its key is repeated.

    A whole JSON value that stands here and is followed by a comma or the closing brace is
    the value: no other value can begin with it and go on so.
    """
    view = memoryview(raw)
    end = begin + len(view)
    if text.startswith(view, begin) and text[_skip_whitespace(text, end)] in b",}":
        return end
    return _skip_value(text, begin)


def _skip_value(text: bytes, begin: int) -> int:
    """Tell where the value at ``begin`` ends, by its structure; the grammar is known to hold."""
    first = text[begin]
    if first == _QUOTE:
        return _end_of_string(text, begin)
    if first not in b"{[":
        match = _SCALAR.match(text, begin)
        return match.end() if match else begin
    depth = 0
    position = begin
    while match := _STRUCTURE.search(text, position):
        position = match.end()
        mark = match[0]
        if mark == b'"':
            position = _end_of_string(text, match.start())
        elif mark in b"{[":
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return position
    raise NotAnObjectError("a value has no end")  # pragma: no cover - the grammar was checked
