"""Every way to lose upstream, at every stage, for every kind of reader: what the client gets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from tests.captures import corrected
from tests.e2e.wire import RESPONSES, Answer, connect, exchange
from tests.fake_scripts import EVENT_STREAM, response_object, stop, stream, vllm_events
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.conftest import Lastword, StartLastword
    from tests.fake_vllm import Exchange, FakeVllm, Handler

LOSSES = ("cut", "end", "reset", "hang", "garbage")
ON_LOST = ("failed_cut", "failed", "abort")
IDLE_S = 0.3


def stages(events: list[bytes]) -> dict[str, tuple[list[bytes] | None, int]]:
    """What upstream sends before it is lost (None: not even a head), and whole events of it."""
    return {
        "before the head": (None, 0),
        "after the head": ([], 0),
        "within created": ([events[0][:60]], 0),
        "after created": (events[:1], 1),
        "within an event": ([*events[:4], events[4][:30]], 4),
        "between events": (events[:5], 5),
        "within the terminal event": ([*events[:-1], events[-1][:300]], len(events) - 1),
        "after the terminal event": (events, len(events)),
    }


def lose(chunks: list[bytes] | None, loss: str) -> Handler:
    """Play what upstream sends, then lose it."""

    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        if chunks is not None:
            await exchange.respond(200, EVENT_STREAM)
            for chunk in chunks:
                await exchange.send(chunk)
        if loss == "garbage":
            await exchange.send_raw(b"no chunk size\r\n")
            await exchange.wait_closed()
        elif chunks is None and loss == "end":
            await exchange.cut()
        else:
            await stop(exchange, loss)  # type: ignore[arg-type]  # the table's words

    return script


def failure(number: int, message: str, *, background: bool) -> bytes:
    """The event that the proxy writes, byte for byte."""
    begun = json.dumps(response_object("in_progress", background=background), separators=(",", ":"))
    failed = begun.replace('"status":"in_progress"', '"status":"failed"')
    error = json.dumps({"code": "server_error", "message": message}, separators=(",", ":"))
    if '"error":null' in failed:
        failed = failed.replace('"error":null', f'"error":{error}')
    else:
        failed = failed[:-1] + f',"error":{error}}}'
    payload = f'{{"response":{failed},"sequence_number":{number},"type":"response.failed"}}'
    return f"event: response.failed\ndata: {payload}\n\n".encode()


def message_of(loss: str) -> str:
    """What the client is told."""
    if loss == "end":
        return "The upstream server ended the stream before the response was finished."
    if loss == "hang":
        return "The upstream server was silent for too long before the response was finished."
    return "The connection to the upstream server was lost before the response was finished."


def assert_refused(answer: Answer, loss: str, stage: str) -> None:
    """Check the error that stands for a response which never began."""
    assert answer.status == (504 if loss == "hang" and stage == "before the head" else 502), stage
    assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("on_lost", ON_LOST)
@pytest.mark.parametrize("loss", LOSSES)
async def test_direct_stream(
    loss: str, on_lost: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """The events that came, then the failure, and the cut that on_lost_upstream asks for."""
    events = vllm_events()
    proxy = await lastword(on_lost_upstream=on_lost, upstream_idle_s=IDLE_S)
    for stage, (chunks, whole) in stages(events).items():
        fake.script(lose(chunks, loss))
        async with connect(proxy.url) as wire:
            await wire.post()
            answer = await wire.answer()
        if chunks is None:
            assert_refused(answer, loss, stage)
        elif whole == len(events):
            assert (answer.body, answer.ending) == (corrected(b"".join(events)), "clean"), stage
        elif whole == 0:  # nothing was created that could fail
            assert (answer.body, answer.ending) == (b"", "cut"), stage
        else:
            own = failure(whole, message_of(loss), background=False)
            told = b"".join(events[:whole]) + (b"" if on_lost == "abort" else own)
            ending = "clean" if on_lost == "failed" else "cut"
            assert (answer.body, answer.ending) == (told, ending), stage


@pytest.mark.parametrize(
    ("loss", "on_lost"),
    [*((loss, "failed_cut") for loss in LOSSES), *(("cut", on_lost) for on_lost in ON_LOST[1:])],
)
async def test_run_and_replay(
    loss: str, on_lost: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A run's readers get the failure and a clean end, whatever on_lost_upstream says."""
    events = vllm_events(background=True)
    proxy = await lastword(
        on_lost_upstream=on_lost, upstream_idle_s=IDLE_S, heartbeat_s=0, background="proxy"
    )
    body = json.dumps({"background": True, "stream": True}).encode()
    for stage, (chunks, whole) in stages(events).items():
        fake.script(lose(chunks, loss))
        async with connect(proxy.url) as wire:
            await wire.post(body)
            answer = await wire.answer()
        if whole == 0:
            assert_refused(answer, loss, stage)
            continue
        own = failure(whole, message_of(loss), background=True)
        told = b"".join(events[:whole]) + own
        if whole == len(events):
            told = corrected(b"".join(events))
        assert (answer.body, answer.ending) == (told, "clean"), stage
        replay = await exchange(proxy.url, "GET", f"{RESPONSES}/resp_1?stream=true")
        assert (replay.body, replay.ending) == (told, "clean"), stage
        await _delete(proxy)


async def _delete(proxy: Lastword) -> None:
    """Make room for the next response of the same id."""
    deleted = await exchange(proxy.url, "DELETE", f"{RESPONSES}/resp_1")
    assert deleted.status == 200


@pytest.mark.parametrize("on_lost", ON_LOST)
async def test_openai_python_notices(on_lost: str, fake: FakeVllm, lastword: StartLastword) -> None:
    """The SDK yields the failure and raises, yields it alone, or raises alone."""
    proxy = await lastword(on_lost_upstream=on_lost)
    fake.script(stream(vllm_events()[:5], ending="cut"))
    seen: list[Any] = []
    raised = False
    async with openai.AsyncOpenAI(
        base_url=f"{proxy.url}/v1", api_key="k", max_retries=0, timeout=PATIENCE_S
    ) as client:
        try:
            async for event in await client.responses.create(model="m", input="x", stream=True):
                seen.append(event)  # noqa: PERF401 - what came before it raises counts
        except openai.APIError:
            raised = True
        except Exception as error:  # noqa: BLE001 - whichever HTTP library the SDK stands on
            raised = "incomplete" in str(error) or "closed" in str(error)
    assert raised is (on_lost != "failed")
    assert (seen[-1].type == "response.failed") is (on_lost != "abort")


UPSTREAM = """
import asyncio, sys
events = sys.stdin.buffer.read().split(b"\\0")
async def serve(reader, writer):
    head = await reader.readuntil(b"\\r\\n\\r\\n")
    writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\n"
                 b"transfer-encoding: chunked\\r\\n\\r\\n")
    for event in events:
        writer.write(b"%x\\r\\n%b\\r\\n" % (len(event), event))
    await asyncio.sleep(60)
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_upstream_killed(lastword: StartLastword) -> None:
    """A vLLM that is killed with SIGKILL mid-stream fails the stream at once."""
    events = vllm_events()[:4]
    upstream = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", UPSTREAM),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert upstream.stdin is not None
    assert upstream.stdout is not None
    upstream.stdin.write(b"\0".join(events))
    upstream.stdin.close()
    async with asyncio.timeout(PATIENCE_S):
        port = int(await upstream.stdout.readline())
    try:
        proxy = await lastword(upstream=f"http://127.0.0.1:{port}")
        async with connect(proxy.url) as wire:
            await wire.post()
            answer = await wire.head()
            while answer.body.count(b"\n\n") < len(events):
                answer.chunks.append(await wire.chunk())
            os.kill(upstream.pid, signal.SIGKILL)
            await wire.body(answer)
    finally:
        if upstream.returncode is None and upstream.pid:
            upstream.kill()
        await upstream.wait()
    assert answer.ending == "cut"
    own = failure(len(events), message_of("reset"), background=False)
    assert answer.body == b"".join(events) + own
    async with httpx.AsyncClient(trust_env=False) as client:
        again = await client.post(f"{proxy.url}{RESPONSES}", json={"stream": True})
    assert again.status_code == 502
