"""A limit on silence."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from proxy.upstream.silence import SilenceLimit
from tests.waiting import PATIENCE_S


async def test_silence_ends_the_block() -> None:
    """Unheard for the limit, the block is ended with TimeoutError."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(PATIENCE_S), SilenceLimit(0.05):
            await asyncio.Event().wait()


async def test_without_a_limit_nothing_ends() -> None:
    """0 is for ever, unless a last limit is set."""
    silence = SilenceLimit(0)
    asyncio.get_running_loop().call_soon(silence.end_after, 0.01)
    with pytest.raises(TimeoutError):
        async with silence:
            await asyncio.Event().wait()


async def test_a_block_that_was_left_is_not_ended() -> None:
    """Whoever sets a limit too late sets none."""
    async with SilenceLimit(0) as silence:
        pass
    silence.end_after(0)
    await asyncio.sleep(0.01)


async def test_time_in_which_upstream_is_not_read_does_not_count() -> None:
    """A client that is full silences upstream; that is not upstream's fault."""
    held = iter([True, True, True])
    looks = 0

    def held_back() -> bool:
        nonlocal looks
        looks += 1
        return next(held, False)

    with pytest.raises(TimeoutError):
        async with SilenceLimit(0.02, held_back=held_back):
            await asyncio.Event().wait()

    assert looks > 3


async def test_what_came_while_this_process_stood_still_is_heard() -> None:
    """After a pause of our own the sockets are read before upstream is called silent."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    done = asyncio.Event()
    ours.setblocking(False)
    with ours, theirs:
        async with asyncio.timeout(PATIENCE_S), SilenceLimit(0.1) as silence:

            def read() -> None:
                ours.recv(100)
                silence.heard_at = loop.time()
                done.set()

            loop.add_reader(ours, read)
            theirs.send(b"x")
            time.sleep(0.3)  # noqa: ASYNC251 - the process stands still
            await done.wait()
        loop.remove_reader(ours)
