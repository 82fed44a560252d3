"""A Lastword behind a Lastword, as a gateway before sidecars: one more hop, and nothing twice."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.captures import corrected
from tests.e2e.background import (
    cancel,
    create,
    creating,
    expected,
    following,
    get,
    kind,
    metric,
    replay,
)
from tests.e2e.process import lastword_process
from tests.e2e.websocket import HANDSHAKE, REALTIME, joined, received, websocket_upstream
from tests.e2e.wire import RESPONSES, STREAM, connect, exchange, post_stream
from tests.fake_responses_api import FakeResponsesApi
from tests.fake_scripts import echo, stream, vllm_events
from tests.front import free_port
from tests.prometheus import total

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.conftest import Lastword, StartLastword
    from tests.fake_vllm import FakeVllm

    Chain = Callable[..., Awaitable[tuple[Lastword, Lastword]]]

EVENTS = vllm_events()
MODES = [
    # Who makes the run: outer, inner.
    pytest.param("auto", "pass", id="auto before pass"),
    pytest.param("auto", "auto", id="auto before auto"),
    pytest.param("auto", "proxy", id="auto before proxy"),
    pytest.param("proxy", "pass", id="proxy before pass"),
    pytest.param("proxy", "auto", id="proxy before auto"),
    pytest.param("pass", "auto", id="pass before auto"),
    pytest.param("pass", "proxy", id="pass before proxy"),
]


@pytest.fixture
def chain(lastword: StartLastword) -> Chain:
    """Give a function that starts two proxies, the outer in front of the inner."""

    async def start(
        outer: dict[str, Any] | None = None, inner: dict[str, Any] | None = None
    ) -> tuple[Lastword, Lastword]:
        behind = await lastword(**inner or {})
        return await lastword(upstream=behind.url, **outer or {}), behind

    return start


async def test_stream_is_corrected_once(fake: FakeVllm, chain: Chain) -> None:
    """The inner one corrects, the outer one finds nothing to do; headers are added by both."""
    outer, inner = await chain()
    fake.script(stream(EVENTS))
    got = await post_stream(outer.url)
    assert (got.body, got.ending) == (corrected(b"".join(EVENTS)), "clean")
    for proxy, corrections in [(inner, 1), (outer, 0)]:
        assert await total(proxy.admin_url, "lastword_corrections_total") == corrections
    [request] = fake.requests
    [via] = request.values("via")
    assert [part.split()[0] for part in via.split(b", ")] == [b"1.1", b"1.1"]
    assert len(set(via.split(b", "))) == 2
    assert request.values("x-request-id") == got.values("x-request-id")
    for name in ("x-request-id", "x-accel-buffering", "cache-control"):
        assert len(got.values(name)) == 1


async def test_trusted_outer_is_named_before_the_peer(fake: FakeVllm, chain: Chain) -> None:
    """With the outer one in ``trusted_proxies`` vLLM learns who asked, through both."""
    outer, _ = await chain(inner={"trusted_proxies": "127.0.0.0/8"})
    fake.handler = echo
    await exchange(outer.url, "GET", "/v1/models", [("Host", "api.example.org")])
    [request] = fake.requests
    assert request.values("x-forwarded-for") == [b"127.0.0.1, 127.0.0.1"]
    assert request.values("x-forwarded-host") == [b"api.example.org"]


@pytest.mark.parametrize("mode", ["off", "observe", "on"])
async def test_switch_is_obeyed_by_both(mode: str, fake: FakeVllm, chain: Chain) -> None:
    """``Lastword-Correct`` goes through: off is off all the way, on overrules both settings."""
    settings = {"correct": "off"} if mode == "on" else {}
    outer, _ = await chain(settings, settings)
    fake.script(stream(EVENTS))
    got = await post_stream(outer.url, STREAM, [("Lastword-Correct", mode)])
    body = b"".join(EVENTS)
    assert got.body == (corrected(body) if mode == "on" else body)


@pytest.mark.parametrize("beat", ["comment", "event"])
async def test_heartbeats_of_the_inner_pass(beat: str, fake: FakeVllm, chain: Chain) -> None:
    """They stand between events, and the outer one, whose client heard them, adds none."""
    inner = {"heartbeat_s": 0.02, "heartbeat_kind": beat}
    outer, _ = await chain({"heartbeat_s": 15}, inner)
    fake.script(stream(EVENTS, gated=True))
    fake.gate("0").open()
    async with connect(outer.url) as wire:
        await wire.post()
        got = await wire.head()
        mark = b'"keepalive"' if beat == "event" else b":"
        while not got.body.endswith(b"\n\n") or mark not in got.body.removeprefix(EVENTS[0]):
            got.chunks.append(await wire.chunk())
        for number in range(len(EVENTS)):
            fake.gate(str(number)).open()
        fake.gate("ending").open()
        await wire.body(got)
    blocks = [block + b"\n\n" for block in got.body.split(b"\n\n")[:-1]]
    beats = [one for one in blocks if one.startswith(b":") or b'"keepalive"' in one]
    assert [one for one in blocks if one not in beats] == [*EVENTS[:-1], corrected(EVENTS[-1])]
    assert len(set(beats)) == 1


@pytest.mark.parametrize(("outer_mode", "inner_mode"), MODES)
async def test_background_through_both(
    outer_mode: str, inner_mode: str, fake: FakeVllm, chain: Chain
) -> None:
    """Stream, replay and object are those of one proxy, from whichever keeps the copy."""
    outer, inner = await chain({"background": outer_mode}, {"background": inner_mode})
    api = FakeResponsesApi(fake, store=inner_mode != "proxy")
    got = await create(outer.url, max_output_tokens=2)
    want = b"".join(expected("incomplete", deltas=2))
    assert (got.status, got.body, got.ending) == (200, want, "clean")
    assert (await replay(outer.url)).body == want
    assert (await replay(outer.url, 3)).body == b"".join(expected("incomplete", deltas=2)[4:])
    assert (await get(outer.url)).json()["status"] == "incomplete"
    if outer_mode != "proxy":  # otherwise only the outer one knows that it is in the background
        assert (await replay(inner.url)).body == want
    assert len(api.runs) <= 1
    assert sum(request.method == "POST" for request in fake.requests) <= 2
    for proxy in (outer, inner):
        assert await metric(proxy.admin_url, "lastword_dropped_copies_total") == 0


@pytest.mark.parametrize(("outer_mode", "inner_mode"), MODES)
async def test_cancel_through_both(
    outer_mode: str, inner_mode: str, fake: FakeVllm, chain: Chain
) -> None:
    """VLLM stops generating, and every follower gets one ``response.failed``."""
    outer, _ = await chain({"background": outer_mode}, {"background": inner_mode})
    api = FakeResponsesApi(fake, gated=True)
    async with creating(outer.url, gated=fake) as creator, following(outer.url) as follower:
        api.step("resp_1", 3)
        await creator.read(4)
        await follower.read(4)
        answer = await cancel(outer.url)
        assert (answer.status, answer.json()["status"]) == (200, "cancelled")
        for one in (creator, follower):
            *before, last = await one.rest()
            assert (before, one.ending) == (expected()[:4], "clean")
            assert kind(last) == ("response.failed", "cancelled", 4)
    await fake.until(lambda: api.runs["resp_1"].aborted)
    assert (await get(outer.url)).json()["status"] == "cancelled"


async def test_client_that_leaves_is_felt_by_vllm(fake: FakeVllm, chain: Chain) -> None:
    """Through both, before the first byte and in the middle of a stream."""
    outer, _ = await chain()
    for number, script in enumerate((stream([], gated=True), stream(EVENTS[:2], ending="hang"))):
        fake.script(script)
        async with connect(outer.url) as wire:
            await wire.post()
            asked = await fake.exchange(number)
            if number:
                await wire.head()
                await wire.chunk()
            wire.leave()
            await asked.until_closed()


async def test_lost_vllm_ends_once(fake: FakeVllm, chain: Chain) -> None:
    """The inner one's ``response.failed`` and cut arrive as one proxy's would."""
    outer, inner = await chain()
    fake.handler = stream(EVENTS[:3], ending="cut")
    one, two = await post_stream(inner.url), await post_stream(outer.url)
    assert one.body.count(b"event: response.failed\n") == 1
    assert (two.body, two.ending) == (one.body, one.ending) == (one.body, "cut")


async def test_drain_of_the_inner_ends_once(fake: FakeVllm, chain: Chain) -> None:
    """A stream that the inner one ends at its shutdown ends so at the outer one, once."""
    outer, inner = await chain()
    fake.script(stream(EVENTS[:2], ending="hang"))
    async with connect(outer.url) as wire:
        await wire.post()
        got = await wire.head()
        while got.body.count(b"\n\n") < 2:
            got.chunks.append(await wire.chunk())
        stopping = asyncio.create_task(inner.gateway.shut_down())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        refused = await post_stream(outer.url)
        assert (refused.status, refused.values("retry-after")) == (503, [b"1"])
        inner.gateway.drain.hurry()  # type: ignore[attr-defined]
        await wire.body(got)
        await stopping
    assert got.body.count(b"event: response.failed\n") == 1
    assert b"The proxy is shutting down." in got.body
    assert got.ending == "cut"


async def test_inner_process_that_is_replaced(fake: FakeVllm, tmp_path: Path) -> None:
    """Its SIGTERM ends a direct stream once; a run goes on with the next process, gap or no gap."""
    api = FakeResponsesApi(fake, gated=True)
    inner: dict[str, Any] = {
        "port": free_port(),
        "store": f"sqlite:{tmp_path}/inner.db",
        "shutdown_grace_s": 0.1,
    }
    async with (
        lastword_process(fake.url, **inner) as first,
        lastword_process(first.url, upstream_down_s=60) as outer,
        creating(outer.url, gated=fake, request_id="run") as follower,
        connect(outer.url) as wire,
    ):
        api.step("run", 2)
        assert await follower.read(3) == expected(response_id="run")[:3]
        await wire.post()
        await fake.until(lambda: len(api.runs) == 2)
        api.step("resp_2", 2)
        direct = await wire.head()
        while direct.body.count(b"\n\n") < 2:
            direct.chunks.append(await wire.chunk())
        assert await first.stop() == 0
        await wire.body(direct)
        assert direct.body.count(b"event: response.failed\n") == 1
        assert (direct.body.endswith(b"\n\n"), direct.ending) == (True, "cut")
        async with lastword_process(fake.url, **inner):
            api.step("run", 100)
            assert await follower.rest() == expected(response_id="run")
            assert follower.ending == "clean"
            assert (await replay(outer.url, response_id="run")).body == follower.data
            assert (await replay(f"http://127.0.0.1:{inner['port']}", response_id="run")).body == (
                follower.data
            )


async def test_websocket_through_both(no_task_left: None, lastword: StartLastword) -> None:
    """Messages, close codes and refusals pass two proxies as they pass one."""
    async with websocket_upstream() as upstream:
        inner = await lastword(upstream=upstream.url)
        outer = await lastword(upstream=inner.url)
        async with joined(outer, upstream) as (client, server):
            await client.send("there")
            assert await received(server) == "there"
            await server.send(b"back")
            assert await received(client) == b"back"


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("background", ["pass", "auto"])
async def test_loop_is_refused(
    hops: int, background: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A proxy whose upstream leads back to it says 508, after one round."""
    port = free_port()
    after = f"http://127.0.0.1:{port}"
    if hops == 1:
        first = await lastword(port=port, upstream=after, background=background)
    else:
        first = await lastword(upstream=after, background=background)
        await lastword(port=port, upstream=first.url, background=background)
    asked = [
        ("GET", "/v1/models", [], None),
        ("POST", RESPONSES, [], STREAM),
        ("POST", RESPONSES, [], b'{"background":true,"stream":true,"input":"x"}'),
        ("GET", RESPONSES + "/resp_1?stream=true", [], None),
        ("GET", REALTIME, HANDSHAKE, None),
    ]
    for method, target, headers, body in asked:
        got = await exchange(first.url, method, target, headers, body)
        assert (got.status, got.json()["error"]["code"]) == (508, 508), target
        assert "leads back to it" in got.json()["error"]["message"]
    assert fake.requests == []
