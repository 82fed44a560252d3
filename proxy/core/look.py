"""One block looked at: what it is and what it says, before anything is done about it.

A pure function of the block's bytes, since a block of many megabytes takes tens of milliseconds:
who has others to serve meanwhile may look in a thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from proxy.core.event import Event, parse_event
from proxy.core.responses import judge, may_be_terminal, read_payload

if TYPE_CHECKING:
    from proxy.core.responses import Payload, Terminal

__all__ = ["Look", "look"]


class Look(NamedTuple):
    """What a block is: a terminal event, or an event, with its payload if that is an object."""

    raw: bytes
    terminal: Terminal | None
    event: Event | None
    payload: Payload | None


def look(block: bytes | bytearray) -> Look:
    """Look at one whole block; the terminal rule is applied (see ``judge``)."""
    if not isinstance(block, bytes):
        block = bytes(block)
    terminal = judge(block) if may_be_terminal(block) else None
    if terminal is not None:
        return Look(terminal.raw, terminal, None, terminal.payload)
    event = parse_event(block)
    return Look(block, None, event, read_payload(event.payload()) if event.data else None)
