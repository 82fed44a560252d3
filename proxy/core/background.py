"""What a background run changes in a request's body and in its events."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from proxy.core.event import parse_event
from proxy.core.json_edit import (
    NotAnObjectError,
    decode_object,
    decode_string,
    member_spans,
    remove_member,
    set_member,
)

__all__ = [
    "CreateRequest",
    "as_queued",
    "error_message",
    "mark_background",
    "read_create",
    "sequence_number",
    "to_foreground",
    "truth",
]

_TRUE = frozenset({"true", "1", "on", "yes", "t", "y"})
_FALSE = frozenset({"false", "0", "off", "no", "f", "n"})


class _Members(msgspec.Struct):
    background: msgspec.Raw = msgspec.Raw(b"null")
    stream: msgspec.Raw = msgspec.Raw(b"null")
    store: msgspec.Raw = msgspec.Raw(b"null")
    request_id: msgspec.Raw = msgspec.Raw(b"null")


class _Numbered(msgspec.Struct):
    sequence_number: int | None = None


class _Error(msgspec.Struct):
    message: str | None = None


class _Failed(msgspec.Struct):
    error: _Error | None = None


_failed = msgspec.json.Decoder(_Failed)
_members = msgspec.json.Decoder(_Members)
_numbered = msgspec.json.Decoder(_Numbered)


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """What a create request asks for; ``store`` is None where the body does not say."""

    background: bool
    stream: bool
    store: bool | None
    request_id: str | None


def truth(text: str) -> bool | None:
    """Read a boolean as vLLM's pydantic does (``true``, ``1``, ``on`` ...); None if it is none."""
    text = text.lower()
    return True if text in _TRUE else False if text in _FALSE else None


def read_create(body: bytes) -> CreateRequest | None:
    """Read what matters of a create request's body; None if it is no JSON object."""
    try:
        members = decode_object(_members, body)
    except NotAnObjectError:
        return None
    return CreateRequest(
        background=_flag(members.background) is True,
        stream=_flag(members.stream) is True,
        store=_flag(members.store),
        request_id=decode_string(members.request_id),
    )


def _flag(raw: msgspec.Raw) -> bool | None:
    text = decode_string(raw)
    if text is None:
        text = bytes(raw).decode("latin-1").removesuffix(".0")
    return truth(text)


def to_foreground(body: bytes) -> bytes:
    """Return the body that asks for the same as a foreground stream.

    Only the member ``background`` is taken out and ``stream`` set; every other byte is kept.
    Raises ``NotAnObjectError`` if the body is no JSON object.
    """
    return set_member(remove_member(body, "background"), "stream", b"true")


def mark_background(block: bytes) -> bytes:
    """Put ``"background": true`` into the response object of an event, as first where it is not.

    An event without a response object is returned as it is.
    """
    if b'"response"' not in block and b"\\u" not in block:
        return block
    event = parse_event(block)
    text = event.payload()
    try:
        outer = member_spans(text).get("response")
        if outer is None:
            return block
        inner = member_spans(text[outer[0] : outer[1]])
    except NotAnObjectError:
        return block
    if "background" in inner:
        begin, end = (outer[0] + place for place in inner["background"])
        if text[begin:end] not in (b"true", b"false", b"null"):
            return block
        new = b"true"
    else:
        begin = end = outer[0] + 1
        new = b'"background":true' + (b"," if inner else b"")
    # A literal, and the place behind a brace, stand within one data line.
    place = event.place(begin)
    return block[:place] + new + block[place + end - begin :]


def as_queued(response: bytes) -> bytes:
    """Return a response object as a create without ``stream`` answers it: ``queued``."""
    return set_member(response, "status", b'"queued"')


def error_message(response: bytes) -> str | None:
    """Return what a response object's ``error`` says, or None."""
    try:
        failed = decode_object(_failed, response)
    except NotAnObjectError:
        return None
    return failed.error.message if failed.error is not None else None


def sequence_number(block: bytes) -> int | None:
    """Return the number of an event, or None if the block has none."""
    try:
        return decode_object(_numbered, parse_event(block).payload()).sequence_number
    except NotAnObjectError:
        return None
