"""What becomes of a stream whose process has stood still for longer than its lease."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from proxy.background.feed import State
from proxy.background.lease_look import LeaseLook
from proxy.store import StoreUnavailableError

if TYPE_CHECKING:
    from proxy.background.run import Run
    from proxy.store.shared import SharedStore
    from proxy.upstream.body import UpstreamStream


class Stand:
    """Run, store and stream at once: all that the look knows of them."""

    def __init__(self) -> None:
        self.state = State.OPEN
        self.lease_overdue = False
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.looks = 0
        self.enough = 1
        self.paused = False
        self.taken: list[bytes] = []
        self.look = LeaseLook(
            cast("SharedStore", self),
            cast("Run", self),
            cast("UpstreamStream", self),
            self.taken.append,
            self.take_http_chunk,
        )

    def take_http_chunk(self, http_chunk: bytes) -> int:
        """Take a chunk of one byte, as itself."""
        self.taken.append(http_chunk)
        return 1

    async def renew_leases(self) -> None:
        """Answer when the test says."""
        self.looks += 1
        await asyncio.shield(self.answer)
        await asyncio.sleep(0)
        self.lease_overdue = self.looks < self.enough

    def pause(self) -> None:
        """Hold upstream back."""
        self.paused = True

    def resume(self) -> None:
        """Let upstream go on."""
        self.paused = False


@pytest.fixture
async def stand() -> Stand:
    """Give one that has just woken."""
    stand = Stand()
    stand.look.take(b"before")
    assert stand.taken == [b"before"]
    stand.taken.clear()
    stand.lease_overdue = True
    assert not stand.look.take_http_chunk(b"1")  # it has to wait as a part of the body
    stand.look.take(b"1")
    await asyncio.sleep(0)
    assert not stand.look.take_http_chunk(b"2")
    stand.look.take(b"2")
    assert (stand.taken, stand.looks, stand.paused) == ([], 1, True)
    return stand


async def test_a_lease_that_is_still_ours(stand: Stand) -> None:
    """All goes on, in order, and upstream with it."""
    stand.answer.set_result(None)
    await stand.look.settled()
    stand.look.take(b"3")
    assert stand.look.take_http_chunk(b"4") == 1
    assert (b"".join(stand.taken), stand.looks, stand.paused) == (b"1234", 1, False)


async def test_a_store_that_is_away(stand: Stand) -> None:
    """No live event waits for it: trying to renew was enough."""
    stand.lease_overdue = False
    assert not stand.look.take_http_chunk(b"3")  # the look is not over yet
    stand.answer.set_exception(StoreUnavailableError("away"))
    await stand.look.settled()
    assert (b"".join(stand.taken), stand.paused) == (b"12", False)


async def test_a_run_that_has_moved(stand: Stand) -> None:
    """What still came is dropped, and upstream stays held back until its stream is closed."""
    stand.state = State.MOVED
    stand.answer.set_result(None)
    await stand.look.settled()
    assert (stand.taken, stand.paused) == ([], True)


async def test_a_process_that_stands_still_again(stand: Stand) -> None:
    """The end of one look begins another; both are waited for."""
    stand.enough = 2
    stand.answer.set_result(None)
    await stand.look.settled()
    assert (b"".join(stand.taken), stand.looks) == (b"12", 2)
