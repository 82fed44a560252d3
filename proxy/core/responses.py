"""The vocabulary of the Responses API and the terminal rule.

vLLM ends every stream with an event named ``response.completed``, also when the response
inside it is ``incomplete`` (vllm#59324, #45386).  The rule: the terminal event's name is the
status of the response.  Only the parsed top level of an event counts; the same words in
metadata, tools or text mean nothing.

========================  =======================  ===================================
the event says            ``response.status``      it is sent as
========================  =======================  ===================================
``response.completed``    ``completed``            untouched
``response.completed``    ``incomplete``           ``response.incomplete``
``response.completed``    ``failed``               ``response.failed``
``response.completed``    ``cancelled``            ``response.failed``: the API has no
                                                   event for it, the payload tells
``response.completed``    anything else            untouched, a contradiction
any other terminal name   anything                 untouched
========================  =======================  ===================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import msgspec

from proxy.core.event import Event, parse_event
from proxy.core.json_edit import NotAnObjectError, decode_object, decode_string, member_spans

__all__ = [
    "COMPLETED",
    "FAILED",
    "INCOMPLETE",
    "TERMINAL_NAMES",
    "Payload",
    "Terminal",
    "is_done_marker",
    "judge",
    "may_be_terminal",
    "read_payload",
]

COMPLETED: Final = "response.completed"
INCOMPLETE: Final = "response.incomplete"
FAILED: Final = "response.failed"
TERMINAL_NAMES: Final = frozenset({COMPLETED, INCOMPLETE, FAILED})

_NAME_FOR_STATUS: Final = {
    "completed": COMPLETED,
    "incomplete": INCOMPLETE,
    "failed": FAILED,
    "cancelled": FAILED,
}
_DONE: Final = b"[DONE]"
_TYPE_AT_THE_END: Final = re.compile(rb',"type":("[a-z_.]*")\}\Z')
_TYPE_AT_THE_END_BYTES: Final = 64


class _ResponseHead(msgspec.Struct):
    id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    status: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Asked(msgspec.Struct):
    """The members of an event's payload that a relay asks for, undecoded."""

    type: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    sequence_number: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    code: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    message: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Members(_Asked):
    response: _ResponseHead | msgspec.UnsetType = msgspec.UNSET


class _AnyMembers(_Asked):
    response: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_members = msgspec.json.Decoder(_Members)
_any_members = msgspec.json.Decoder(_AnyMembers)
_response_head = msgspec.json.Decoder(_ResponseHead)
_integer = msgspec.json.Decoder(int)


@dataclass(frozen=True, slots=True)
class Payload:
    """What the top level of an event's JSON payload says; None where it says nothing usable.

    ``text`` is the payload itself, ``has_response`` whether it holds a response object, and
    ``error`` the ``error`` member, as text that is still part of it (``bytes()`` copies it).
    """

    text: bytes
    type: str | None
    has_response: bool
    response_id: str | None
    status: str | None
    model: str | None
    sequence_number: int | None
    error: msgspec.Raw | None
    code: str | None
    message: str | None

    def response(self) -> bytes:
        """Return the text of the response object, which costs a look at the whole payload."""
        begin, end = member_spans(self.text)["response"]
        return self.text[begin:end]


def read_payload(text: bytes) -> Payload | None:
    """Read an event's payload without decoding what is not asked for; None if it is no object.

    One look at it does, since it may be large: what the response says of itself is read with it.
    """
    try:
        members, head = _read_members(text)
    except NotAnObjectError:
        return None
    has_response = head is not None
    head = head or _ResponseHead()
    return Payload(
        text=text,
        type=_text(members.type),
        has_response=has_response,
        response_id=_text(head.id),
        status=_text(head.status),
        model=_text(head.model),
        sequence_number=_whole_number(members.sequence_number),
        error=None if isinstance(members.error, msgspec.UnsetType) else members.error,
        code=_text(members.code),
        message=_text(members.message),
    )


def _read_members(text: bytes) -> tuple[_Asked, _ResponseHead | None]:
    """Read what is asked for, and the head of the response object if there is one."""
    try:
        members = decode_object(_members, text)
    except NotAnObjectError:  # or a member "response" that is no object, which may be repeated
        others = decode_object(_any_members, text)
        if isinstance(others.response, msgspec.UnsetType):
            return others, None
        try:
            return others, decode_object(_response_head, bytes(others.response))
        except NotAnObjectError:
            return others, None
    response = members.response
    return members, None if isinstance(response, msgspec.UnsetType) else response


def _text(raw: msgspec.Raw | msgspec.UnsetType) -> str | None:
    return None if isinstance(raw, msgspec.UnsetType) else decode_string(raw)


def _whole_number(raw: msgspec.Raw | msgspec.UnsetType) -> int | None:
    if isinstance(raw, msgspec.UnsetType):
        return None
    try:
        return _integer.decode(raw)
    except msgspec.MsgspecError:
        return None


def may_be_terminal(block: bytes) -> bool:
    r"""Tell cheaply, and never wrongly with False, whether a block can be a terminal event.

    A terminal name stands in the block as it is, unless JSON escapes spell it, and of these
    only ``\u`` can spell letters and dots.
    """
    return (
        block.find(b"response.completed") >= 0
        or block.find(b"response.incomplete") >= 0
        or block.find(b"response.failed") >= 0
        or block.find(b"\\u") >= 0
    )


def is_done_marker(event: Event) -> bool:
    """Tell whether an event is the ``[DONE]`` that some servers send last."""
    return event.payload() == _DONE


@dataclass(frozen=True, slots=True)
class Terminal:
    """A terminal event and what the rule makes of it.

    ``says`` is the name it came with, ``name`` the one it is sent with, ``raw`` its bytes as
    they are to be sent.  ``contradiction`` says that it says completed and its payload
    neither confirms that nor says otherwise.
    """

    says: str
    name: str
    status: str | None
    contradiction: bool
    raw: bytes
    payload: Payload | None

    @property
    def corrected(self) -> bool:
        """Whether the rule changed the name."""
        return self.says != self.name


def judge(block: bytes) -> Terminal | None:
    """Apply the terminal rule to one whole block; None if it is no terminal event.

    The JSON ``type`` says what an event is, and the ``event`` field where there is no such
    string (both official SDKs read the type alone).  Where the rule asks for another name,
    both places are changed, each only if it says ``response.completed``.
    """
    event = parse_event(block)
    if not event.data:
        return None  # without data nothing is dispatched (WHATWG, section 9.2.6)
    text = event.payload()
    payload = read_payload(text)
    says = payload.type if payload is not None else None
    if says is None:
        says = (event.name_value or b"").decode("utf-8", "replace")
    if says not in TERMINAL_NAMES:
        return None
    status = payload.status if payload is not None else None
    if says != COMPLETED:
        return Terminal(says, says, status, False, block, payload)
    name = _NAME_FOR_STATUS.get(status) if status is not None else None
    if name is None:
        return Terminal(says, says, status, True, block, payload)
    if name != says:
        block = _rename(event, text, name)
    return Terminal(says, name, status, False, block, payload)


def _rename(event: Event, text: bytes, name: str) -> bytes:
    """Write ``name`` where the event says ``response.completed``, and change nothing else."""
    edits: list[tuple[int, int, bytes]] = []
    if event.name is not None and event.name_value == COMPLETED.encode():
        edits.append((*event.name, name.encode()))
    span = _type_span(text)
    if span is not None and decode_string(text[span[0] : span[1]]) == COMPLETED:
        # A JSON string has no line ends in it, so it stands within one data line.
        begin = event.place(span[0])
        edits.append((begin, begin + span[1] - span[0], b'"%b"' % name.encode()))
    raw = event.raw
    pieces: list[bytes | memoryview] = []
    position = 0
    for begin, end, new in sorted(edits):
        pieces += (memoryview(raw)[position:begin], new)
        position = end
    pieces.append(memoryview(raw)[position:])
    return b"".join(pieces)


def _type_span(text: bytes) -> tuple[int, int] | None:
    """Tell where the value of ``type`` stands in a payload that is known to be a JSON object.

    vLLM writes it last. There it is told by the end of the text alone: a quote behind a comma and
    before the letters of a key can only open that key, and what closes the text closes the object
    that the key belongs to.
    """
    last = _TYPE_AT_THE_END.search(text, max(0, len(text) - _TYPE_AT_THE_END_BYTES))
    return last.span(1) if last is not None else member_spans(text).get("type")
