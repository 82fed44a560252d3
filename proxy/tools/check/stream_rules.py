"""What the events of one truncated stream say rightly or wrongly on their way to its end.

Each rule is a function from what was read to an answer; none of these faults is corrected.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from proxy.core.event import parse_event
from proxy.core.json_edit import NotAnObjectError, decode_object
from proxy.core.output_items import OutputItems
from proxy.core.responses import read_payload
from proxy.tools.check import questions
from proxy.tools.check.report import (
    Answer,
    NotApplicableError,
    NotAskedError,
    Question,
    fault,
    fine,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.core.responses import Terminal

__all__ = ["RULES", "ToldStream"]

_BEGINNINGS = ("_item.added", "_part.added", ".delta")


class _Item(msgspec.Struct):
    id: str | None = None
    type: str | None = None
    status: str | None = None


class _Told(msgspec.Struct):
    """The members of an event that the rules ask for."""

    type: str = ""
    output_index: int | None = None
    content_index: int | None = None
    item: _Item | None = None


class _Usage(msgspec.Struct):
    output_tokens: int | None = None
    input_tokens_details: dict[str, msgspec.Raw] | None = None
    output_tokens_details: dict[str, msgspec.Raw] | None = None


class _Response(msgspec.Struct):
    status: str | None = None
    output: list[_Item] | None = None
    usage: _Usage | None = None


_told = msgspec.json.Decoder(_Told)
_response = msgspec.json.Decoder(_Response)


@dataclass(frozen=True)
class ToldStream:
    """A stream that has ended: its events, its terminal event, and what it was asked for."""

    blocks: list[bytes]
    terminal: Terminal
    max_output_tokens: int
    ignores_eos: bool

    @cached_property
    def events(self) -> list[_Told]:
        """The events that can be read."""
        return [event for block in self.blocks if (event := _read(block)) is not None]

    @cached_property
    def response(self) -> _Response:
        """The response object of the last event; ``NotAskedError`` if it cannot be read."""
        payload = self.terminal.payload
        if payload is None or not payload.has_response:
            raise NotAskedError("its last event holds no response object")
        try:
            return _response.decode(payload.response())
        except (msgspec.MsgspecError, RecursionError) as error:
            raise NotAskedError("the response object of its last event cannot be read") from error


def _read(block: bytes) -> _Told | None:
    try:
        return decode_object(_told, parse_event(block).payload())
    except NotAnObjectError:
        return None


def _status(stream: ToldStream) -> Answer:
    """An answer whose limit was hit is incomplete; vLLM 0.11 to 0.13 say completed."""
    status, usage = stream.response.status, stream.response.usage
    if status == "incomplete":
        return fine("incomplete")
    made = usage.output_tokens if usage is not None else None
    if status != "completed" or made is None:
        raise NotAskedError(f"its status is {status}")
    if made < stream.max_output_tokens or not stream.ignores_eos:
        raise NotAskedError(f"the answer was complete after {made} tokens")
    return fault(f"says completed after {made} of {stream.max_output_tokens} tokens")


def _numbers(stream: ToldStream) -> Answer:
    for place, block in enumerate(stream.blocks):
        event = parse_event(block)
        payload = read_payload(event.payload())
        if payload is None:
            return fault(f"event {place} is no JSON object")
        if payload.sequence_number != place:
            return fault(f"event {place} has the number {payload.sequence_number}")
        if event.name_value is not None and event.name_value != (payload.type or "").encode():
            return fault(f"event {place} has another name than type")
    return fine("from 0 without a gap")


def _content_index(stream: ToldStream) -> Answer:
    """A text event carries the index of the part that it belongs to."""
    opened: dict[int | None, int | None] = {}
    asked = False
    for event in stream.events:
        if event.type.endswith("_part.added"):
            opened[event.output_index] = event.content_index
        elif event.content_index is not None and event.output_index in opened:
            asked = True
            part = opened[event.output_index]
            if event.content_index != part:
                return fault(f"{event.content_index} within part {part}")
    if not asked:
        raise NotApplicableError("the stream has no parts")
    return fine("that of the open part")


def _done_events(stream: ToldStream) -> Answer:
    """Codex shows what ``output_item.done`` says, so it shows nothing where that is missing."""
    seen = {(event.type, event.output_index) for event in stream.events}
    missing = {
        done.removeprefix("response.")
        for kind, index in seen
        if kind.endswith(_BEGINNINGS)
        and ((done := kind.rpartition(".")[0] + ".done"), index) not in seen
    }
    if missing:
        return fault(f"no {', no '.join(sorted(missing))}")
    return fine("yes")


def _reasoning_events(stream: ToldStream) -> Answer:
    """The API has no ``reasoning_part`` events; vLLM up to 0.31 sends them."""
    kinds = {event.type for event in stream.events}
    if any(kind.startswith("response.reasoning_part.") for kind in kinds):
        return fault("named reasoning_part")
    if any(kind.startswith("response.reasoning_") for kind in kinds):
        return fine("named content_part")
    raise NotApplicableError("the answer has no reasoning")


def _usage(stream: ToldStream) -> Answer:
    """Clients that check what they read (@openai/agents) fail on arrays there."""
    usage = stream.response.usage
    if usage is None:
        raise NotApplicableError("its last event tells no usage")
    details = (usage.input_tokens_details or {}) | (usage.output_tokens_details or {})
    arrays = sorted(name for name, raw in details.items() if bytes(raw).startswith(b"["))
    if arrays:
        return fault(f"arrays, such as {arrays[0]}")
    return fine("numbers")


def _last_output(stream: ToldStream) -> Answer:
    """Only the last delta is in the last event of vLLM 0.11 to 0.13."""
    items = OutputItems()
    for block in stream.blocks:
        items.take(block)
    payload = stream.terminal.payload
    if payload is None or not payload.has_response:
        raise NotAskedError("its last event holds no response object")
    response = payload.response()
    if items.fill(response) != response:
        return fault("holds less than the stream has told")
    return fine("what the stream has told")


def _item_status(stream: ToldStream) -> Answer:
    if stream.response.status != "incomplete" or not stream.response.output:
        raise NotApplicableError("no item was truncated")
    status = stream.response.output[-1].status
    return fault("completed") if status == "completed" else fine(status or "none")


def _item_ids(stream: ToldStream) -> Answer:
    """An agent answers a call by its id, so it must be one and the same."""
    streamed = {event.item.id for event in stream.events if event.item is not None}
    last = {item.id for item in stream.response.output or ()}
    if not streamed or not last:
        raise NotApplicableError("no item was told twice")
    if not last <= streamed:
        return fault("the last event has others than the stream")
    return fine("the same in the stream and at its end")


RULES: dict[Question, Callable[[ToldStream], Answer]] = {
    questions.TRUNCATED_STATUS: _status,
    questions.NUMBERS: _numbers,
    questions.CONTENT_INDEX: _content_index,
    questions.DONE_EVENTS: _done_events,
    questions.REASONING_EVENTS: _reasoning_events,
    questions.USAGE: _usage,
    questions.LAST_OUTPUT: _last_output,
    questions.ITEM_STATUS: _item_status,
    questions.ITEM_IDS: _item_ids,
}
