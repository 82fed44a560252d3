"""A response's output as its stream told it, for servers whose last payload tells less."""

from __future__ import annotations

import msgspec

from proxy.core.event import parse_event
from proxy.core.json_edit import NotAnObjectError, decode_object, member_spans, set_member

__all__ = ["OutputItems"]


class _ItemDone(msgspec.Struct):
    type: str
    output_index: int
    item: msgspec.Raw


class _Part(msgspec.Struct):
    text: str | None = None


class _Item(msgspec.Struct):
    content: list[_Part] | None = None
    arguments: str | None = None


_item_done = msgspec.json.Decoder(_ItemDone)
_items = msgspec.json.Decoder(list[_Item])


class OutputItems:
    """Collect the items of ``response.output_item.done`` events.

    vLLM 0.11 to 0.13 put only the last delta into the last payload's ``output``.
    """

    def __init__(self) -> None:
        self._items: dict[int, bytes] = {}

    def take(self, block: bytes) -> None:
        """Remember an event's item if it is one that is done."""
        if b"response.output_item.done" not in block:
            return
        try:
            done = decode_object(_item_done, parse_event(block).payload())
        except NotAnObjectError:
            return
        if done.type == "response.output_item.done":
            self._items[done.output_index] = bytes(done.item)

    def fill(self, response: bytes) -> bytes:
        """Return the response object, its ``output`` replaced if the stream has told more."""
        told = b"[%b]" % b",".join(self._items[index] for index in sorted(self._items))
        try:
            span = member_spans(response).get("output")
        except NotAnObjectError:
            return response
        output = response[span[0] : span[1]] if span is not None else b"[]"
        if _measure(told) > _measure(output):
            return set_member(response, "output", told)
        return response


def _measure(output: bytes) -> tuple[int, int]:
    """How much an output says: its items, and the length of their text and arguments.

    A message without a word is no item: vLLM tells of one that it then leaves out itself.
    """
    try:
        items = _items.decode(output)
    except (msgspec.MsgspecError, RecursionError):
        return (0, 0)
    texts = [sum(len(part.text or "") for part in item.content or ()) for item in items]
    count = sum(item.content is None or text > 0 for item, text in zip(items, texts, strict=True))
    return (count, sum(texts) + sum(len(item.arguments or "") for item in items))
