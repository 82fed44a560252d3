"""The terminal event of a response that upstream did not end, and what it blames."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from proxy.core.event import encode_event
from proxy.core.json_edit import decode_string, set_member
from proxy.core.responses import FAILED, read_payload

if TYPE_CHECKING:
    from proxy.core.responses import Payload

__all__ = ["blame", "failed_event"]


def failed_event(
    response: bytes, *, status: str, code: str, message: str, after: int | None
) -> bytes:
    """Return a ``response.failed`` with the response object, every byte kept but two members.

    These are ``status`` and ``error``, which holds ``code`` and ``message``.  ``after`` is the
    number of the event before, None before the first.
    """
    error = msgspec.json.encode({"code": code, "message": message})
    response = set_member(response, "status", b'"%b"' % status.encode())
    response = set_member(response, "error", error)
    payload = b'{"response":%b,"sequence_number":%d,"type":"%b"}' % (
        response,
        0 if after is None else after + 1,
        FAILED.encode(),
    )
    return encode_event(FAILED.encode(), payload)


def blame(told: Payload | None, code: str, message: str) -> tuple[str, str]:
    """Prefer what an ``error`` event of upstream's told to ``code`` and ``message``."""
    if told is None:
        return code, message
    if told.error is None:
        return told.code or code, told.message or message
    inner = read_payload(bytes(told.error))
    if inner is None:  # "error": "some words", as vLLM's 401 has it
        return code, decode_string(told.error) or message
    return inner.code or code, inner.message or message
