"""The switch: correct=on, observe or off, globally and for one request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.captures import corrected
from tests.e2e.wire import RESPONSES, STREAM, connect, exchange, post_stream
from tests.fake_scripts import Ending, cut, echo, stream, vllm_events

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import FakeVllm

EVENTS = vllm_events()
BODY = b"".join(EVENTS)


@pytest.mark.parametrize("globally", ["on", "observe", "off"])
async def test_request_overrules_the_setting(
    globally: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """The header decides where there is one; only `on` changes a byte. The header goes up."""
    proxy = await lastword(correct=globally)
    fake.handler = stream(EVENTS)
    for asked in (None, "on", "observe", "off"):
        headers = [("Lastword-Correct", asked)] if asked else []
        want = corrected(BODY) if (asked or globally) == "on" else BODY
        assert (await post_stream(proxy.url, STREAM, headers)).body == want, asked
        replay = await exchange(proxy.url, "GET", RESPONSES + "/resp_1?stream=true", headers)
        assert replay.body == want, asked
        for request in fake.requests[-2:]:
            assert request.values("lastword-correct") == ([asked.encode()] if asked else [])


@pytest.mark.parametrize("value", ["yes", "", "true", "on,off"])
async def test_unknown_value_is_refused(
    value: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A value that does not exist is 400 and says what does; upstream is not asked."""
    proxy = await lastword()
    answer = await post_stream(proxy.url, headers=[("Lastword-Correct", value)])
    error = answer.json()["error"]
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    assert all(word in error["message"] for word in ("on", "observe", "off"))
    assert fake.requests == []


async def test_header_means_nothing_elsewhere(fake: FakeVllm, lastword: StartLastword) -> None:
    """On routes that are not looked at the header passes, whatever it says."""
    proxy = await lastword()
    fake.handler = echo
    answer = await exchange(proxy.url, "GET", "/v1/models", [("Lastword-Correct", "maybe")])
    assert answer.status == 200
    assert fake.requests[0].values("lastword-correct") == [b"maybe"]


@pytest.mark.parametrize("mode", ["observe", "off"])
async def test_untouched_means_every_byte(
    mode: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Without correction nothing is dropped, completed or held: a BOM, half an event, a tail."""
    proxy = await lastword(correct=mode)
    body = b"\xef\xbb\xbf" + BODY + b"event: more\ndata: 1\n\n" + b"data: half"
    fake.script(stream(cut(body, range(40, len(body), 40))))
    answer = await post_stream(proxy.url)
    assert (answer.body, answer.ending) == (body, "clean")


@pytest.mark.parametrize("mode", ["observe", "off"])
async def test_untouched_bytes_pass_at_once(
    mode: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Without correction there is nothing to wait for, not even the end of an event."""
    proxy = await lastword(correct=mode)
    pieces = [BODY[:100], BODY[100:250], BODY[250:], b": after the end\n\n"]
    fake.script(stream(pieces, gated=True))
    async with connect(proxy.url) as wire:
        await wire.post()
        await wire.head()
        for number, piece in enumerate(pieces):
            fake.gate(str(number)).open()
            assert await wire.chunk() == piece
        fake.gate("ending").open()
        assert await wire.chunk() == b""


@pytest.mark.parametrize("mode", ["observe", "off"])
@pytest.mark.parametrize("ending", ["cut", "end"])
async def test_untouched_streams_end_as_upstream_ended_them(
    mode: str, ending: Ending, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Without correction no ending of ours is added, neither after a cut nor after a clean end."""
    proxy = await lastword(correct=mode)
    fake.script(stream(EVENTS[:4], ending=ending))
    answer = await post_stream(proxy.url)
    assert answer.body == b"".join(EVENTS[:4])
    assert answer.ending == ("clean" if ending == "end" else "cut")


async def test_observed_errors_keep_their_body(fake: FakeVllm, lastword: StartLastword) -> None:
    """A plain answer is the same under every mode."""
    proxy = await lastword(correct="observe")
    fake.handler = echo
    answer = await post_stream(proxy.url)
    assert json.loads(answer.json()["body"]) == json.loads(STREAM)
