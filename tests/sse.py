"""A client's reading of an event stream, by the letter of WHATWG HTML 9.2.6, for the tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from proxy.core.event import fields
from proxy.core.event_stream import EventStreamDecoder

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass
class Interpreter:
    """Dispatches events from blocks, with the last event ID and the retry time."""

    events: list[dict[str, str]] = field(default_factory=list)
    last_event_id: str = ""
    retry_ms: int | None = None

    def take(self, block: bytes) -> None:
        """Interpret the fields of one block and dispatch it."""
        data: list[str] = []
        name = ""
        for key, begin, end in fields(block):
            value = block[begin:end].decode("utf-8", "replace")
            if key == b"data":
                data.append(value)
            elif key == b"event":
                name = value
            elif key == b"id" and "\0" not in value:
                self.last_event_id = value
            elif key == b"retry" and value.isascii() and value.isdigit():
                self.retry_ms = int(value)
        if data:
            self.events.append(
                {"event": name or "message", "data": "\n".join(data), "id": self.last_event_id}
            )


def interpret(chunks: Iterable[bytes]) -> Interpreter:
    """Decode chunks with the decoder under test and interpret its blocks."""
    decoder = EventStreamDecoder()
    interpreter = Interpreter()
    for chunk in chunks:
        for block in decoder.feed(chunk):
            interpreter.take(block)
    return interpreter


def cut(data: bytes, *places: int) -> list[bytes]:
    """Cut data at the given places."""
    edges = [0, *sorted(places), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


def one_by_one(data: bytes) -> list[bytes]:
    """Cut data into single bytes."""
    return [data[i : i + 1] for i in range(len(data))]
