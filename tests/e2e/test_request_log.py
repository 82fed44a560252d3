"""One line per request, at its end, that says what an operator asks for and nothing secret."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.e2e.background import create, replay
from tests.e2e.crash import killed_fork
from tests.e2e.process import lastword_process
from tests.e2e.websocket import REALTIME, closed, joined, received, websocket_upstream
from tests.e2e.wire import RESPONSES, STREAM, connect, exchange, post_stream
from tests.fake_responses_api import FakeResponsesApi
from tests.fake_scripts import answer, event, response_object, stream, vllm_events
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.fake_vllm import FakeVllm

EVENTS = vllm_events()
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = ("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01")
NAMED = (("X-Request-Id", "mine"), TRACEPARENT)
SECRETS = (("Authorization", "Bearer SECRET"), ("Cookie", "a=SECRET"), ("X-Api-Key", "SECRET"))
TIMES = {"duration_s", "time_to_first_event_s"}


class Log:
    """What a proxy has logged."""

    def __init__(self, path: Path, url: str) -> None:
        self._path = path
        self.url = url

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Return the lines of one kind; each must be JSON and say when and how bad."""
        raw = self._path.read_bytes()
        assert b"SECRET" not in raw
        told = [json.loads(line) for line in raw.splitlines(keepends=True) if line.endswith(b"\n")]
        assert all({"timestamp", "level", "event"} <= line.keys() for line in told)
        return [line for line in told if line["event"] == event]

    async def requests(self, count: int) -> list[dict[str, Any]]:
        """Wait for so many requests' lines; return them without times, which must be there."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.lines("request")) < count:  # noqa: ASYNC110 - another process writes
                await asyncio.sleep(0.01)
        lines = self.lines("request")
        assert len(lines) == count
        for line in lines:
            assert line["level"] == "info"
            assert 0 <= line.get("time_to_first_event_s", 0) <= line["duration_s"]
        dropped = TIMES | {"timestamp", "level", "event"}
        return [{k: v for k, v in line.items() if k not in dropped} for line in lines]


@asynccontextmanager
async def logging(tmp_path: Path, fake: FakeVllm, **settings: Any) -> AsyncIterator[Log]:
    """Run a proxy in a process of its own, and read its log."""
    path = tmp_path / "log"
    async with killed_fork(path, **{"upstream": fake.url, "background": "pass"} | settings) as url:
        yield Log(path, url)


async def test_stream(tmp_path: Path, fake: FakeVllm) -> None:
    """A stream's line has what was seen of it; the trace goes up and is told."""
    fake.handler = stream(EVENTS)
    async with logging(tmp_path, fake) as log:
        target = f"{RESPONSES}?key=SECRET"
        head = [("Content-Type", "application/json"), *NAMED, *SECRETS]
        body = STREAM.replace(b"moby", b"SECRET")
        got = await exchange(log.url, "POST", target, head, body)
        assert got.ending == "clean"
        assert await log.requests(1) == [
            {
                "method": "POST",
                "route": RESPONSES,
                "status": 200,
                "outcome": "incomplete",
                "response_id": "resp_1",
                "model": "tiny",
                "mode": "on",
                "corrected": True,
                "events": len(EVENTS),
                "bytes": len(b"".join(EVENTS)),
                "request_id": "mine",
                "trace_id": TRACE,
            }
        ]
        assert log.lines("request")[0].keys() >= TIMES
    assert fake.requests[0].values("traceparent") == [TRACEPARENT[1].encode()]


async def test_other_requests(tmp_path: Path, fake: FakeVllm) -> None:
    """What passes, what is refused, and what nobody waits for any more: a line each."""
    fake.handler = answer(200, body=b"[]")
    async with logging(tmp_path, fake) as log:
        for path in ("/v1/models?api_key=SECRET", "/SECRET/x", f"{RESPONSES}/resp_x"):
            await exchange(log.url, "GET", path, NAMED)
        unreadable = [*NAMED, ("Content-Encoding", "SECRET")]
        await exchange(log.url, "POST", RESPONSES, unreadable, STREAM)
        lines = await log.requests(4)
        known = {"method": "GET", "request_id": "mine", "trace_id": TRACE}
        passed = known | {"status": 200, "outcome": "answered", "bytes": 2}
        assert lines[0] == passed | {"route": "/v1/models"}
        assert lines[1] == passed | {"route": "other"}
        assert lines[2] == passed | {"route": RESPONSES + "/{id}", "response_id": "resp_x"}
        assert lines[3].pop("bytes") > 0
        refused = {"method": "POST", "route": RESPONSES, "status": 415, "outcome": "refused"}
        assert lines[3] == known | refused
        await exchange(log.url, "GET", "//SECRET", NAMED)  # ended before it was a request
        (line,) = log.lines("a request was refused")
        assert (line["status"], line["level"]) == (400, "info")

        fake.handler = stream(EVENTS[:2], ending="hang")
        async with connect(log.url) as wire:
            await wire.post()
            await wire.head()
            await wire.chunk()
        left = (await log.requests(5))[4]
        assert (left["outcome"], left["status"]) == ("client_gone", 200)

        fake.handler = stream([b"{"], headers=[("content-type", "application/json")], ending="cut")
        await exchange(log.url, "GET", "/v1/models")
        assert (await log.requests(6))[5]["outcome"] == "lost"
        assert len(log.lines("upstream broke off within a body")) == 1

        await fake.stop_listening()
        await fake.drop_connections()
        assert (await post_stream(log.url)).status == 502
        failed = (await log.requests(7))[6]
        assert (failed["outcome"], failed["status"]) == ("refused", 502)
        assert [line["level"] for line in log.lines("upstream failed")] == ["warning"]


async def test_websockets(no_task_left: None, fake: FakeVllm, tmp_path: Path) -> None:
    """A WebSocket is a line at its end, which says who ended it, and how."""
    async with (
        websocket_upstream() as upstream,
        logging(tmp_path, fake, upstream=upstream.url) as log,
    ):
        for number, outcome in enumerate(("answered", "lost", "client_gone"), 1):
            headers = dict([*NAMED, *SECRETS])
            async with joined(
                log, upstream, f"{REALTIME}?key=SECRET", additional_headers=headers
            ) as (client, server):
                await client.send("SECRET")
                assert await received(server) == "SECRET"
                if outcome == "answered":
                    await server.close(1000, "SECRET")
                else:
                    (server if outcome == "lost" else client).transport.abort()
                await closed(client if outcome == "lost" else server)
            assert (await log.requests(number))[-1] == {
                "method": "GET",
                "route": "other",
                "status": 101,
                "outcome": outcome,
                "request_id": "mine",
                "trace_id": TRACE,
            }
        (lost,) = log.lines("a WebSocket was lost")
        assert (lost["level"], lost["request_id"]) == ("warning", "mine")


async def test_websocket_at_shutdown(no_task_left: None) -> None:
    """One that the proxy's own end closes is nobody's loss: it was stopped."""
    settings: dict[str, Any] = {
        "background": "pass",
        "log_format": "json",
        "shutdown_grace_s": 0.1,
    }
    async with (
        websocket_upstream() as upstream,
        lastword_process(upstream.url, **settings) as proxy,
        joined(proxy, upstream) as (client, server),
    ):
        stopping = asyncio.create_task(proxy.stop())
        assert await closed(client) == await closed(server) == (1001, "The proxy is shutting down.")
        assert await stopping == 0
    (line,) = [line for line in proxy.log() if line["event"] == "request"]
    assert (line["status"], line["outcome"]) == (101, "stopped")
    assert not [line for line in proxy.log() if line["level"] == "warning"]


async def test_warnings(tmp_path: Path, fake: FakeVllm) -> None:
    """A contradiction, a lost stream and a dropped copy: one warning each, with the response."""
    odd = event("response.completed", 2, response=response_object("paused"))
    settings = {"background": "proxy", "max_copy_bytes": 500, "log_requests": False}
    async with logging(tmp_path, fake, **settings) as log:
        for chunks in ([*EVENTS[:2], odd], EVENTS[:3]):
            fake.handler = stream(chunks)
            await post_stream(log.url)
        FakeResponsesApi(fake)
        await create(log.url)
        fake.script(stream(vllm_events(response_id="run")[:2], ending="cut"))
        await create(log.url)
        kinds = {
            "the terminal event says completed and its payload does not": {"status": "paused"},
            "upstream was lost within a stream": {"route": RESPONSES},
            "a copy was dropped; its live stream goes on": {"reason": "full"},
            "upstream was lost within a background response": {
                "error": "The connection to the upstream server was lost before the response was"
                " finished."
            },
        }
        for kind, told in kinds.items():
            async with asyncio.timeout(PATIENCE_S):
                while not log.lines(kind):  # noqa: ASYNC110 - another process writes it
                    await asyncio.sleep(0.01)
            response_id = "run" if "background" in kind else "resp_1"
            (line,) = [line for line in log.lines(kind) if line["response_id"] == response_id]
            assert line["level"] == "warning"
            assert told.items() <= line.items()
        assert log.lines("request") == []


async def test_background(tmp_path: Path, fake: FakeVllm) -> None:
    """A run's creator and the reader of its copy are told how the response ended."""
    FakeResponsesApi(fake)
    async with logging(tmp_path, fake, background="proxy") as log:
        await create(log.url, (*NAMED, *SECRETS))
        await replay(log.url, None, SECRETS)
        created, replayed = await log.requests(2)
    assert created.pop("model") == "tiny"
    assert created.pop("corrected") is False
    told = {"status": 200, "outcome": "completed", "response_id": "resp_1"}
    assert created == told | {
        "method": "POST",
        "route": RESPONSES,
        "request_id": "mine",
        "trace_id": TRACE,
    }
    assert replayed.pop("request_id")
    assert replayed == told | {"method": "GET", "route": RESPONSES + "/{id}"}
