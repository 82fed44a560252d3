"""Large events are looked at aside: nothing else waits, and nothing else changes."""

from __future__ import annotations

import asyncio
import threading
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from proxy.core.event_stream import LARGE_BYTES
from proxy.core.look import look
from proxy.gateway import large_events
from tests.captures import corrected
from tests.e2e.wire import connect, post_stream
from tests.fake_scripts import EVENT_STREAM, Ending, event, stream, vllm_events
from tests.prometheus import total, until_total
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.core.look import Look
    from tests.conftest import StartLastword
    from tests.e2e.wire import Answer
    from tests.fake_vllm import FakeVllm

SMALL = vllm_events()
LARGE_END = vllm_events(padding=LARGE_BYTES)
ITEM = event("response.output_text.done", 4, text="x" * LARGE_BYTES)
LARGE_WITHIN = [*SMALL[:4], ITEM, *SMALL[4:]]


class SlowLook:
    """Looks of large events stand still until the test lets them go on."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()

    def __call__(self, block: bytes) -> Look:
        """Look, when the test says so."""
        self.begun.release()
        assert self.go_on.wait(PATIENCE_S)
        return look(block)

    async def until_begun(self) -> None:
        """Wait until a look has begun."""
        assert await asyncio.to_thread(self.begun.acquire, timeout=PATIENCE_S)


@pytest.fixture
def slow_look(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowLook]:
    """Put a slow look in the place of the quick one."""
    slow = SlowLook()
    monkeypatch.setattr(large_events, "look", slow)
    yield slow
    slow.go_on.set()


async def slowly(url: str, slow_look: SlowLook, *, pause_s: float = 0.05) -> Answer:
    """Ask for a stream, let a look at it take so long, and return the answer."""
    answering = asyncio.create_task(post_stream(url))
    await slow_look.until_begun()
    await asyncio.sleep(pause_s)  # what upstream sends now, and its end, may come
    assert not answering.done()
    slow_look.go_on.set()
    return await answering


async def test_other_streams_go_on_meanwhile(
    fake: FakeVllm, lastword: StartLastword, slow_look: SlowLook
) -> None:
    """A whole stream passes while another's last event is looked at."""
    proxy = await lastword()
    fake.script(stream(LARGE_END), stream(SMALL))
    large = asyncio.create_task(post_stream(proxy.url))
    await slow_look.until_begun()
    assert (await post_stream(proxy.url)).body == corrected(b"".join(SMALL))
    assert not large.done()
    slow_look.go_on.set()
    assert (await large).body == corrected(b"".join(LARGE_END))


@pytest.mark.parametrize("ending", ["end", "cut", "reset"])
async def test_what_comes_behind_a_large_event_stays_behind_it(
    ending: Ending, fake: FakeVllm, lastword: StartLastword, slow_look: SlowLook
) -> None:
    """Events, the end and even a loss of upstream wait for the look."""
    proxy = await lastword()
    fake.script(stream([*LARGE_WITHIN[:-1], LARGE_END[-1]], ending=ending))
    answer = await slowly(proxy.url, slow_look)
    await (await fake.exchange()).until_finished()
    assert answer.body == corrected(b"".join([*LARGE_WITHIN[:-1], LARGE_END[-1]]))
    assert answer.ending == "clean"


async def test_upstream_lost_behind_a_large_event(
    fake: FakeVllm, lastword: StartLastword, slow_look: SlowLook
) -> None:
    """The failure is told behind the event, with the number that is due."""
    proxy = await lastword()
    fake.script(stream(LARGE_WITHIN[:5], ending="cut"))
    answer = await slowly(proxy.url, slow_look)
    assert answer.body.startswith(b"".join(LARGE_WITHIN[:5]) + b"event: response.failed\n")
    assert b'"sequence_number":5,"type":"response.failed"}' in answer.body
    assert answer.ending == "cut"


async def test_client_that_leaves_during_a_look(
    fake: FakeVllm, lastword: StartLastword, slow_look: SlowLook
) -> None:
    """Upstream is let go at once; what the look finds concerns nobody, and no room is held."""
    proxy = await lastword()
    fake.script(stream(LARGE_END, ending="hang"))
    async with connect(proxy.url) as wire:
        await wire.post()
        await wire.head()
        await slow_look.until_begun()
        assert await total(proxy.admin_url, "lastword_buffered_bytes") >= LARGE_BYTES
        wire.leave()
        await (await fake.exchange()).until_closed()
    await until_total(proxy.admin_url, 0, "lastword_buffered_bytes")


async def test_a_stop_during_a_look(
    fake: FakeVllm, lastword: StartLastword, slow_look: SlowLook
) -> None:
    """An end that has come already is the end, however long the look at it takes."""
    proxy = await lastword(upstream_idle_s=0.2)
    fake.script(stream(LARGE_END, ending="hang"))
    answer = await slowly(proxy.url, slow_look, pause_s=0.5)  # longer than it may be silent
    assert (answer.body, answer.ending) == (corrected(b"".join(LARGE_END)), "clean")


async def test_a_long_look_is_not_upstreams_silence(
    fake: FakeVllm, lastword: StartLastword, slow_look: SlowLook
) -> None:
    """Upstream is held back meanwhile, and cannot speak."""
    proxy = await lastword(upstream_idle_s=0.2)
    fake.script(stream(LARGE_WITHIN))
    answer = await slowly(proxy.url, slow_look, pause_s=0.5)
    assert (answer.body, answer.ending) == (corrected(b"".join(LARGE_WITHIN)), "clean")


async def test_a_shutdown_during_a_look(
    fake: FakeVllm, lastword: StartLastword, slow_look: SlowLook
) -> None:
    """A stream that is ended by the proxy's own end still gets the end that has come for it."""
    proxy: Any = await lastword()
    fake.script(stream(LARGE_END, ending="hang"))
    answering = asyncio.create_task(post_stream(proxy.url))
    await slow_look.until_begun()
    proxy.gateway.drain.stop_streams("The proxy stops.")
    await asyncio.sleep(0.05)
    slow_look.go_on.set()
    answer = await answering
    assert (answer.body, answer.ending) == (corrected(b"".join(LARGE_END)), "clean")


async def test_observed_bytes_do_not_wait(
    fake: FakeVllm, lastword: StartLastword, slow_look: SlowLook
) -> None:
    """They pass as they come; what the look finds is counted."""
    proxy = await lastword(correct="observe")
    fake.script(stream([*LARGE_WITHIN[:-1], LARGE_END[-1]]))
    body = b"".join([*LARGE_WITHIN[:-1], LARGE_END[-1]])
    async with connect(proxy.url) as wire:
        await wire.post()
        answer = await wire.head()
        await slow_look.until_begun()
        while len(answer.body) < len(b"".join(LARGE_WITHIN[:5])):
            answer.chunks.append(await wire.chunk())
        slow_look.go_on.set()
        assert (await wire.body(answer)).body == body
    await until_total(proxy.admin_url, 1, "lastword_corrections_total", mode="observe")


async def test_compressed_large_events(
    fake: FakeVllm, lastword: StartLastword, slow_look: SlowLook
) -> None:
    """The pieces behind a large event wait while it is looked at."""
    proxy = await lastword()
    body = b"".join([*LARGE_WITHIN[:-1], LARGE_END[-1]])
    packer = zlib.compressobj(wbits=31)
    packed = packer.compress(body) + packer.flush()
    fake.script(stream([packed], headers=[*EVENT_STREAM, ("content-encoding", "gzip")]))
    assert (await slowly(proxy.url, slow_look)).body == corrected(body)


async def test_a_look_that_fails(
    fake: FakeVllm, lastword: StartLastword, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of our own ends the one stream with a cut, at once, and no other."""

    def fail(_: bytes) -> Look:
        raise LookupError("a fault for the test")

    proxy = await lastword()
    monkeypatch.setattr(large_events, "look", fail)
    fake.script(stream(LARGE_END, ending="hang"), stream(SMALL))
    answer = await post_stream(proxy.url)
    assert answer.ending == "cut"
    assert answer.body == b"".join(LARGE_END[:-1])
    assert (await post_stream(proxy.url)).body == corrected(b"".join(SMALL))


async def test_a_compressed_stream_is_not_unpacked_ahead_of_a_look(
    fake: FakeVllm, lastword: StartLastword, slow_look: SlowLook
) -> None:
    """A few compressed kilobytes behind a large event may be megabytes: they wait packed."""
    proxy = await lastword()
    comment = b": %b\n\n" % (b"x" * 2**15)
    body = b"".join([*LARGE_WITHIN[:5], comment * 400, *LARGE_WITHIN[5:]])
    packer = zlib.compressobj(wbits=31)
    packed = packer.compress(body) + packer.flush()
    fake.script(stream([packed], headers=[*EVENT_STREAM, ("content-encoding", "gzip")]))
    answering = asyncio.create_task(post_stream(proxy.url))
    await slow_look.until_begun()
    await asyncio.sleep(0.2)
    assert await total(proxy.admin_url, "lastword_buffered_bytes") < 2 * LARGE_BYTES
    slow_look.go_on.set()
    assert (await answering).body == corrected(body)


async def test_a_full_client_holds_upstream_back_behind_a_look(
    fake: FakeVllm, lastword: StartLastword, slow_look: SlowLook
) -> None:
    """The end of a look lets upstream go on only if the client takes more."""
    proxy = await lastword()
    large, behind = b": %b\n\n" % (b"x" * 2**23), b": %b\n\n" % (b"x" * 2**15)
    fake.script(stream([SMALL[0], large, *[behind] * 700, *SMALL[1:]]))
    async with connect(proxy.url, receive_buffer=2**14) as wire:
        await wire.post()
        await wire.head()
        await slow_look.until_begun()
        slow_look.go_on.set()
        asked = await fake.exchange()
        assert await asked.until_stalled() < len(large) + 350 * len(behind)
        assert not asked.finished.is_set()
