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

from dataclasses import dataclass
from typing import Final

import msgspec

from proxy.core.event_stream import Event, parse_event
from proxy.core.json_edit import NotAnObjectError, decode_string, member_spans, readable

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
_OPEN: Final = b"{"[0]


class _Members(msgspec.Struct):
    """The members of an event's payload that a relay asks for, undecoded."""

    type: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    response: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    sequence_number: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    code: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    message: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _ResponseHead(msgspec.Struct):
    id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    status: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_members = msgspec.json.Decoder(_Members)
_response_head = msgspec.json.Decoder(_ResponseHead)
_integer = msgspec.json.Decoder(int)


@dataclass(frozen=True, slots=True)
class Payload:
    """What the top level of an event's JSON payload says; None where it says nothing usable.

    ``response`` is the response object and ``error`` the ``error`` member, as text that is
    still part of the event's (``bytes()`` copies it).
    """

    type: str | None
    response: msgspec.Raw | None
    response_id: str | None
    status: str | None
    model: str | None
    sequence_number: int | None
    error: msgspec.Raw | None
    code: str | None
    message: str | None


def read_payload(text: bytes) -> Payload | None:
    """Read an event's payload without decoding what is not asked for; None if it is no object."""
    try:
        members = _members.decode(readable(text))
    except (msgspec.MsgspecError, RecursionError, NotAnObjectError):
        return None
    response = _object(members.response)
    head = _read_head(response) if response is not None else _ResponseHead()
    return Payload(
        type=_text(members.type),
        response=response,
        response_id=_text(head.id),
        status=_text(head.status),
        model=_text(head.model),
        sequence_number=_whole_number(members.sequence_number),
        error=None if isinstance(members.error, msgspec.UnsetType) else members.error,
        code=_text(members.code),
        message=_text(members.message),
    )


def _object(raw: msgspec.Raw | msgspec.UnsetType) -> msgspec.Raw | None:
    if isinstance(raw, msgspec.UnsetType) or memoryview(raw)[0] != _OPEN:
        return None
    return raw


def _text(raw: msgspec.Raw | msgspec.UnsetType) -> str | None:
    return None if isinstance(raw, msgspec.UnsetType) else decode_string(raw)


def _whole_number(raw: msgspec.Raw | msgspec.UnsetType) -> int | None:
    if isinstance(raw, msgspec.UnsetType):
        return None
    try:
        return _integer.decode(raw)
    except msgspec.MsgspecError:
        return None


def _read_head(response: msgspec.Raw) -> _ResponseHead:
    try:
        return _response_head.decode(response)
    except (msgspec.MsgspecError, RecursionError):  # pragma: no cover - it was read once
        return _ResponseHead()


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
    span = member_spans(text).get("type")
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
