"""Leases, appends and take-overs in every order: one writer at a time, one copy without a gap."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from proxy.store import Block, CopyInfo, CopyKey, CopyLostError, Gone
from proxy.store.redis import RedisStore
from proxy.store.shared import LeaseLostError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.redis_server import RedisServer

KEY = CopyKey("a" * 64, "resp_1")
LEASE_S = 10.0
PROCESSES = st.integers(0, 2)


class Leases(RuleBasedStateMachine):
    """Three processes and one copy, beside what must be true of it.

    A process knows what it believes: whether it writes, and how many blocks it has stored.
    """

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now = 1_000.0
        prefix = f"{uuid.uuid4().hex}:"
        self.stores = [
            RedisStore(self.url, prefix=prefix, lease_s=LEASE_S, clock=lambda: self.now)
            for _ in range(3)
        ]
        self.believes: dict[int, int] = {}  # process -> blocks, of those that think they write
        self.holder: int | None = None
        self.held_until = 0.0
        self.blocks: list[Block] = []
        self.state = "none"

    def teardown(self) -> None:
        """Close the stores."""
        for store in self.stores:
            self.do(store.aclose())
        self.loop.close()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do something to the end."""
        return self.loop.run_until_complete(work)

    @initialize(process=PROCESSES)
    def begin(self, process: int) -> None:
        """Begin with a copy, or most that follows would be about none."""
        self.create(process)

    @rule(process=PROCESSES)
    def create(self, process: int) -> None:
        """Make the copy, or hear that it is there."""
        there = self.do(self.stores[process].create(KEY, meta=b"", snapshot=b""))
        if self.state in {"open", "ended"}:
            assert there.blocks == len(self.blocks)
            return
        assert there is None
        self.state, self.blocks = "open", []
        self.holder, self.held_until = process, self.now + LEASE_S
        self.believes = {process: 0}

    @precondition(lambda self: self.believes)
    @rule(data=st.data(), count=st.integers(1, 3))
    def append(self, data: st.DataObject, count: int) -> None:
        """Let whoever thinks it writes append: only the holder may, only at the end."""
        process = data.draw(st.sampled_from(sorted(self.believes)))
        after = self.believes[process]
        blocks = [Block(after + n, b"%d by %d" % (after + n, process)) for n in range(count)]
        work = self.stores[process].append(KEY, after, blocks)
        if self.state == "open" and process == self.holder:
            self.do(work)
            self.blocks += blocks
            self.believes[process] = len(self.blocks)
            return
        with pytest.raises(CopyLostError) as refused:
            self.do(work)
        if self.state == "open":
            assert isinstance(refused.value, LeaseLostError)
        del self.believes[process]

    @precondition(lambda self: self.believes)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Let whoever thinks it writes end the copy."""
        process = data.draw(st.sampled_from(sorted(self.believes)))
        if self.state == "open" and process != self.holder:
            with pytest.raises(LeaseLostError):
                self.do(self.stores[process].end(KEY))
        elif self.state == "gone":
            with pytest.raises(CopyLostError):
                self.do(self.stores[process].end(KEY))
        else:
            self.do(self.stores[process].end(KEY))
            self.state = "ended"
        del self.believes[process]

    @precondition(lambda self: self.believes)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """Let whoever thinks it writes drop the copy: another's it may not."""
        process = data.draw(st.sampled_from(sorted(self.believes)))
        mine = self.state == "open" and process == self.holder
        if self.state != "ended":
            assert self.do(self.stores[process].drop(KEY, Gone.DROPPED)) is mine
            del self.believes[process]
        if mine:
            self.state = "gone"

    @rule(process=PROCESSES)
    def take(self, process: int) -> None:
        """Take the copy over: only once its lease has run out, and only while it is open."""
        taken = self.do(self.stores[process].take(KEY))
        free = self.state == "open" and self.held_until <= self.now
        assert (taken is not None) is free
        if free:
            assert taken.info.blocks == len(self.blocks)
            self.holder, self.held_until = process, self.now + LEASE_S
            self.believes[process] = len(self.blocks)

    @rule(process=PROCESSES)
    def take_over(self, process: int) -> None:
        """Take the copy when whoever writes it has been silent for too long."""
        self.let_time_pass(LEASE_S)
        self.take(process)

    @rule(processes=st.permutations(range(3)))
    def take_at_once(self, processes: list[int]) -> None:
        """Let all try at the same time: exactly one wins."""

        async def race() -> list[Any]:
            return await asyncio.gather(*(self.stores[p].take(KEY) for p in processes))

        won = [p for p, taken in zip(processes, self.do(race()), strict=True) if taken]
        free = self.state == "open" and self.held_until <= self.now
        assert len(won) == free
        if free:
            self.holder, self.held_until = won[0], self.now + LEASE_S
            self.believes[won[0]] = len(self.blocks)

    @rule(process=PROCESSES)
    def renew(self, process: int) -> None:
        """Renew what a process thinks it holds; it hears if that is wrong."""
        lost: list[CopyKey] = []
        self.stores[process]._leases.on_lost = lost.append
        self.do(self.stores[process].renew_leases())
        if process == self.holder and self.state == "open":
            assert not lost
            self.held_until = self.now + LEASE_S
        if lost:
            assert process != self.holder
            self.believes.pop(process, None)

    @precondition(lambda self: self.state == "open" and self.holder in self.believes)
    @rule()
    def release(self) -> None:
        """Give the copy back: anyone may take it at once."""
        assert self.holder is not None
        self.do(self.stores[self.holder].release(KEY))
        del self.believes[self.holder]
        self.holder, self.held_until = None, 0.0

    @rule(seconds=st.sampled_from([1.0, LEASE_S / 2, LEASE_S, LEASE_S + 1]))
    def let_time_pass(self, seconds: float) -> None:
        """Turn everybody's clock."""
        self.now += seconds

    @invariant()
    def the_copy_is_whole(self) -> None:
        """Whoever reads it gets exactly what the holders have appended, in order."""
        store = self.stores[0]
        found = self.do(store.get(KEY))

        async def read() -> list[Block]:
            return [block async for batch in store.read(KEY) for block in batch]

        if self.state in {"open", "ended"}:
            assert isinstance(found, CopyInfo)
            assert (found.ended_at is not None) is (self.state == "ended")
            assert self.do(read()) == self.blocks
        else:
            assert not isinstance(found, CopyInfo)
            assert self.do(read()) == []


def test_leases(redis_server: RedisServer) -> None:
    """See the machine above."""
    Leases.url = redis_server.url
    case = Leases.TestCase
    case.settings = settings(
        max_examples=30,
        stateful_step_count=25,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes
        suppress_health_check=list(HealthCheck),
    )
    case().runTest()
