"""Large events aside: what waits, what is held back, what is accounted for."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from proxy.core.corrector import Corrector
from proxy.core.event_stream import LARGE_BYTES
from proxy.core.held_bytes import HeldBytes
from proxy.core.look import look
from proxy.gateway import large_events
from proxy.gateway.large_events import LargeEvents
from tests.fake_scripts import event
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.core.look import Look
    from proxy.core.progress import Seen

LARGE = event("response.output_text.done", 1, text="x" * LARGE_BYTES)
SMALL = event("response.output_text.done", 2, text="x")


class Stand:
    """A stream with its corrector, and a thread that looks when it may."""

    def __init__(self, max_event_bytes: int = 64 * LARGE_BYTES) -> None:
        self.told: list[str] = []
        self.sent: list[bytes] = []
        self.account = HeldBytes(1 << 30)
        self.may_look = threading.Event()
        self.events = LargeEvents(
            Corrector(max_event_bytes=max_event_bytes),
            deliver=self.deliver,
            again=self.again,
            hold=lambda: self.told.append("hold"),
            go_on=lambda: self.told.append("go on"),
            give_up=lambda: self.told.append("give up"),
            share=self.account.share(),
        )

    def look(self, block: bytes) -> Look:
        """Look, once it may be."""
        assert self.may_look.wait(PATIENCE_S)
        return look(block)

    def deliver(self, seen: list[Seen]) -> None:
        """Take what is to be sent."""
        self.sent += [one.raw for one in seen]

    def again(self, chunk: bytes) -> None:
        """Take up what had to wait."""
        self.told.append("again")
        self.events.take(chunk)

    async def settled(self) -> None:
        """Let it look, and wait for what comes of it."""
        self.may_look.set()
        async with asyncio.timeout(PATIENCE_S):
            await self.events.settled()


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    """Give a stand; its thread is let go at the end."""
    stand = Stand()
    monkeypatch.setattr(large_events, "look", stand.look)
    yield stand
    stand.may_look.set()


@pytest.mark.parametrize("count", [1, 2 * LARGE_BYTES // len(SMALL)])
async def test_small_events_do_not_wait(stand: Stand, count: int) -> None:
    """There is nothing to be held back for, however many come at once."""
    stand.events.take(SMALL * count)
    assert (stand.sent, stand.told) == ([SMALL] * count, [])
    await stand.events.settled()


async def test_what_comes_meanwhile_waits(stand: Stand) -> None:
    """In its order, accounted for, with upstream held back each time that something comes."""
    stand.events.take(LARGE + SMALL)
    assert stand.events.looking
    assert stand.account.held == len(LARGE + SMALL)
    stand.events.take(SMALL[:9])
    stand.events.take(SMALL[9:])
    assert (stand.sent, stand.told) == ([], ["hold"] * 3)
    assert stand.account.held == len(LARGE + SMALL * 2)
    await stand.settled()
    assert stand.sent == [LARGE, SMALL, SMALL]
    assert stand.told == ["hold", "hold", "hold", "go on", "again"]
    assert (stand.events.looking, stand.account.held) == (False, 0)


async def test_one_large_event_behind_another(stand: Stand) -> None:
    """The end of one look begins the next; both are waited for."""
    stand.events.take(LARGE)
    stand.events.take(LARGE)
    await stand.settled()
    assert stand.sent == [LARGE, LARGE]
    assert stand.told == ["hold", "hold", "go on", "again", "hold", "go on"]


async def test_parts_of_an_event_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass as they come, unjudged: nobody looks at them, however large they are."""
    stand = Stand(max_event_bytes=LARGE_BYTES)
    looked_at: list[bytes] = []

    def note(block: bytes) -> Look:
        looked_at.append(block)
        return look(block)

    monkeypatch.setattr(large_events, "look", note)
    longer = Stand(max_event_bytes=2 * LARGE_BYTES)
    longer.events.take(b"data: %b\n\n" % (b"x" * 3 * LARGE_BYTES) + LARGE)
    await longer.settled()
    assert b"".join(longer.sent).endswith(b"x\n\n" + LARGE)
    assert looked_at == [LARGE]
    looked_at.clear()
    event_bytes = LARGE + LARGE[:-2] + b"x" * 9
    stand.events.take(event_bytes[: LARGE_BYTES + 9])
    stand.events.take(event_bytes[LARGE_BYTES + 9 : 2 * LARGE_BYTES + 99])
    assert not stand.events.looking
    stand.events.take(event_bytes[2 * LARGE_BYTES + 99 :] + b"\n\n" + SMALL)
    await stand.settled()
    assert b"".join(stand.sent) == event_bytes + b"\n\n" + SMALL
    assert looked_at == []


async def test_a_stream_that_is_given_up(stand: Stand) -> None:
    """Nothing is delivered any more, and nothing is held."""
    before = asyncio.all_tasks()
    stand.events.take(LARGE)
    stand.events.take(SMALL)
    (task,) = asyncio.all_tasks() - before
    await asyncio.sleep(0)
    stand.events.close()
    assert stand.account.held == 0
    stand.may_look.set()
    await asyncio.wait([task], timeout=PATIENCE_S)
    assert task.cancelled()
    assert stand.sent == []


async def test_delivering_fails(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits is told at once, and whoever settles gets the error."""

    def fail(_: list[Seen]) -> None:
        raise LookupError("a fault for the test")

    monkeypatch.setattr(stand.events, "_deliver", fail)
    stand.events.take(LARGE)
    with pytest.raises(LookupError):
        await stand.settled()
    assert stand.told == ["hold", "give up"]
    stand.events.close()
    assert stand.account.held == 0
