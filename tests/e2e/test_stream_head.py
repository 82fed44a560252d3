"""The head of an event stream: what counts as one, and what is added to it."""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING

import pytest

from tests.captures import corrected
from tests.e2e.wire import RESPONSES, exchange, post_stream
from tests.fake_scripts import EVENT_STREAM, cut, stream, vllm_events
from tests.prometheus import total

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import FakeVllm


@pytest.mark.parametrize(
    "content_type", ["text/event-stream", "Text/Event-Stream ; charset=utf-8", "text/event-stream;"]
)
async def test_content_type_in_any_spelling(
    content_type: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """The media type decides, not its case or parameters; it goes down as it came."""
    proxy = await lastword()
    events = vllm_events()
    fake.script(stream(events, headers=[("content-type", content_type)]))
    answer = await post_stream(proxy.url)
    assert answer.body == corrected(b"".join(events))
    assert answer.values("content-type") == [content_type.encode()]


@pytest.mark.parametrize("status", [400, 429, 500])
async def test_event_stream_of_an_error_is_not_looked_at(
    status: int, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Only a 2xx answer is a Responses stream."""
    proxy = await lastword()
    events = vllm_events()
    fake.script(stream(events, status=status))
    answer = await post_stream(proxy.url)
    assert (answer.status, answer.body) == (status, b"".join(events))


async def test_buffering_is_switched_off_downstream(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """Event streams tell the proxies before us not to hold them back, unless upstream spoke."""
    proxy = await lastword()
    fake.script(stream(vllm_events()))
    answer = await post_stream(proxy.url)
    assert answer.values("x-accel-buffering") == [b"no"]
    assert answer.values("cache-control") == [b"no-cache"]
    own = [("x-accel-buffering", "yes"), ("cache-control", "no-store")]
    fake.script(stream(vllm_events(), headers=[*EVENT_STREAM, *own]))
    answer = await post_stream(proxy.url)
    assert answer.values("x-accel-buffering") == [b"yes"]
    assert answer.values("cache-control") == [b"no-store"]


async def test_identity_is_asked_for(fake: FakeVllm, lastword: StartLastword) -> None:
    """On the two routes no compressed stream is asked for, whatever the client would take."""
    proxy = await lastword()
    fake.handler = stream(vllm_events())
    await post_stream(proxy.url, headers=[("Accept-Encoding", "gzip, br")])
    await exchange(proxy.url, "GET", RESPONSES + "/resp_1", [("Accept-Encoding", "gzip")])
    asked = [request.values("accept-encoding") for request in fake.requests]
    assert asked == [[b"identity"], [b"identity"]]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_compressed_stream_is_decoded(
    coding: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A stream that comes compressed all the same is corrected and sent as identity."""
    proxy = await lastword()
    body = b"".join(vllm_events())
    packed = gzip.compress(body) if coding == "gzip" else zlib.compress(body)
    headers = [*EVENT_STREAM, ("content-encoding", coding)]
    fake.script(stream(cut(packed, range(10, len(packed), 10)), headers=headers))
    answer = await post_stream(proxy.url)
    assert answer.values("content-encoding") == []
    assert answer.body == corrected(body)


async def test_unknown_coding_passes(fake: FakeVllm, lastword: StartLastword) -> None:
    """A coding that we cannot read goes on as it came."""
    proxy = await lastword()
    body = b"\x0b\x02\x80event: response.completed\n\n\x03"
    fake.script(stream([body], headers=[*EVENT_STREAM, ("content-encoding", "br")]))
    answer = await post_stream(proxy.url)
    assert answer.values("content-encoding") == [b"br"]
    assert (answer.body, answer.ending) == (body, "clean")


@pytest.mark.parametrize(
    ("correct", "coding", "counted"),
    [("on", "gzip", "decoded"), ("on", "br", "passed"), ("observe", "gzip", "passed")],
)
async def test_compressed_stream_is_counted(
    correct: str, coding: str, counted: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """As what became of it: observed bytes pass as they came."""
    proxy = await lastword(correct=correct)
    packed = gzip.compress(b"".join(vllm_events()))
    fake.script(stream([packed], headers=[*EVENT_STREAM, ("content-encoding", coding)]))
    answer = await post_stream(proxy.url)
    assert (answer.body == packed) is (counted == "passed")
    name = "lastword_compressed_streams_total"
    assert await total(proxy.admin_url, name, coding=counted) == 1
    assert await total(proxy.admin_url, name) == 1
