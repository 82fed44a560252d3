"""A real nginx in front: as it is by default towards the proxy, and as the README says to set it.

By default nginx speaks HTTP/1.0 to the proxy and buffers. `X-Accel-Buffering: no` takes the
buffers away, and where a closed connection would be a proper end, a cut is a reset.
"""

from __future__ import annotations

import json
import shutil
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from tests.captures import corrected
from tests.e2e.wire import RESPONSES, connect
from tests.fake_responses_api import FakeResponsesApi
from tests.fake_scripts import Ending, close_without_answer, hang, stream, vllm_events
from tests.front import assert_events_arrive_promptly, free_port, listening, read_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from tests.conftest import StartLastword
    from tests.fake_vllm import FakeVllm

    StartNginx = Callable[[str, str], Awaitable[str]]

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(
    NGINX is None, reason="nginx is not installed (Debian: apt-get install nginx-light)"
)

EVENTS = vllm_events()
HEARTBEAT = b": keep-alive\n\n"
DEFAULTS = "proxy_pass http://lastword;"
RECOMMENDED = """
      proxy_pass http://lastword;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_read_timeout 600s;
"""
TOWARDS_PROXY = [pytest.param(DEFAULTS, id="defaults"), pytest.param(RECOMMENDED, id="recommended")]
CONF = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log info;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream lastword {{ server {proxy}; keepalive 16; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ {towards_proxy} }}
  }}
}}
"""


@pytest.fixture
async def nginx(tmp_path: Path) -> AsyncIterator[StartNginx]:
    """Give a function that starts an nginx of our own in front of a proxy."""
    async with AsyncExitStack() as stack:

        async def start(proxy_url: str, towards_proxy: str) -> str:
            port = free_port()
            conf = tmp_path / "nginx.conf"
            conf.write_text(
                CONF.format(
                    folder=tmp_path,
                    proxy=proxy_url.removeprefix("http://"),
                    port=port,
                    towards_proxy=towards_proxy,
                )
            )
            assert NGINX is not None
            log = str(tmp_path / "error.log")
            command = (NGINX, "-c", str(conf), "-p", str(tmp_path), "-e", log)
            await stack.enter_async_context(listening(port, *command))
            return f"http://127.0.0.1:{port}"

        yield start


def assert_failed(block: bytes, number: int) -> None:
    """Check that it is one event, the failure that the proxy writes itself."""
    assert block.count(b"\n\n") == 1
    assert block.startswith(b"event: response.failed\n")
    payload = json.loads(block.partition(b"data: ")[2])
    assert payload["sequence_number"] == number
    assert payload["response"]["status"] == "failed"
    assert payload["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize("towards_proxy", TOWARDS_PROXY)
async def test_events_arrive_promptly(
    towards_proxy: str, fake: FakeVllm, lastword: StartLastword, nginx: StartNginx
) -> None:
    """Each event is with the client before the next is sent; the stream is corrected, and clean."""
    proxy = await lastword()
    await assert_events_arrive_promptly(fake, await nginx(proxy.url, towards_proxy))


@pytest.mark.parametrize("towards_proxy", TOWARDS_PROXY)
async def test_head_arrives_before_the_first_event(
    towards_proxy: str, fake: FakeVllm, lastword: StartLastword, nginx: StartNginx
) -> None:
    """While vLLM prefills the client has its head; the header meant for nginx stays there."""
    proxy = await lastword()
    url = await nginx(proxy.url, towards_proxy)
    fake.script(stream(EVENTS, gated=True))
    async with connect(url) as wire:
        await wire.post()
        answer = await wire.head()
        assert answer.values("content-type") == [b"text/event-stream; charset=utf-8"]
        assert not answer.values("x-accel-buffering")


@pytest.mark.parametrize("ending", ["cut", "reset", "end"])
@pytest.mark.parametrize("towards_proxy", TOWARDS_PROXY)
async def test_lost_upstream_is_seen_by_the_client(
    towards_proxy: str, ending: Ending, fake: FakeVllm, lastword: StartLastword, nginx: StartNginx
) -> None:
    """The client gets response.failed, and then its body is cut: in both configurations."""
    proxy = await lastword()
    url = await nginx(proxy.url, towards_proxy)
    fake.script(stream(EVENTS[:5], gated=True, ending=ending))
    for number in range(5):
        fake.gate(str(number)).open()
    sent = b"".join(EVENTS[:5])
    async with connect(url) as wire:
        await wire.post()
        answer = await wire.head()
        await read_until(wire, answer, sent)
        fake.gate("ending").open()
        await wire.body(answer)
    assert answer.body.startswith(sent)
    assert_failed(answer.body.removeprefix(sent), 5)
    assert answer.ending == "cut"


@pytest.mark.parametrize("setting", ["failed", "abort"])
@pytest.mark.parametrize("towards_proxy", TOWARDS_PROXY)
async def test_other_ways_to_end_a_lost_stream(
    towards_proxy: str, setting: str, fake: FakeVllm, lastword: StartLastword, nginx: StartNginx
) -> None:
    """With on_lost_upstream=failed the end is clean behind nginx too; with abort the cut is all."""
    proxy = await lastword(on_lost_upstream=setting)
    url = await nginx(proxy.url, towards_proxy)
    fake.script(stream(EVENTS[:5], ending="cut"))
    sent = b"".join(EVENTS[:5])
    async with connect(url) as wire:
        await wire.post()
        answer = await wire.answer()
    if setting == "failed":
        assert answer.body.startswith(sent)
        assert_failed(answer.body.removeprefix(sent), 5)
        assert answer.ending == "clean"
    else:
        assert (answer.body, answer.ending) == (sent, "cut")


async def test_without_the_proxy_a_loss_is_not_seen(fake: FakeVllm, nginx: StartNginx) -> None:
    """The control: to nginx as it is by default a lost server is a clean end."""
    url = await nginx(fake.url, DEFAULTS)
    fake.script(stream(EVENTS[:5], ending="eof"))  # as uvicorn answers HTTP/1.0: without framing
    async with connect(url) as wire:
        await wire.post()
        answer = await wire.answer()
    assert (answer.body, answer.ending) == (b"".join(EVENTS[:5]), "clean")


@pytest.mark.parametrize("towards_proxy", TOWARDS_PROXY)
async def test_cut_that_is_not_ours_to_name_is_a_cut(
    towards_proxy: str, fake: FakeVllm, lastword: StartLastword, nginx: StartNginx
) -> None:
    """Before response.created there is nothing to fail, and on other routes nothing is added."""
    proxy = await lastword()
    url = await nginx(proxy.url, towards_proxy)
    for target, events in ((RESPONSES, []), ("/v1/chat/completions", EVENTS[:2])):
        fake.script(stream(events, ending="cut"))
        async with connect(url) as wire:
            await wire.request("POST", target, body=b"{}")
            answer = await wire.answer()
        assert (answer.status, answer.body) == (200, b"".join(events))
        assert answer.ending == "cut"


@pytest.mark.parametrize("towards_proxy", TOWARDS_PROXY)
async def test_failure_before_the_head_is_an_answer(
    towards_proxy: str, fake: FakeVllm, lastword: StartLastword, nginx: StartNginx
) -> None:
    """The proxy's own 502 passes through nginx with its words, not nginx's page."""
    proxy = await lastword()
    url = await nginx(proxy.url, towards_proxy)
    fake.script(close_without_answer)
    async with connect(url) as wire:
        await wire.post()
        answer = await wire.answer()
    assert answer.status == 502
    assert "broke off" in answer.json()["error"]["message"]


@pytest.mark.parametrize("towards_proxy", TOWARDS_PROXY)
async def test_client_that_leaves_closes_upstream(
    towards_proxy: str, fake: FakeVllm, lastword: StartLastword, nginx: StartNginx
) -> None:
    """In mid-stream and while vLLM prefills, nginx passes the leaving on, and so does the proxy."""
    proxy = await lastword()
    url = await nginx(proxy.url, towards_proxy)
    fake.script(stream(EVENTS[:3], ending="hang"), hang)
    async with connect(url) as wire:
        await wire.post()
        answer = await wire.head()
        await read_until(wire, answer, EVENTS[2])
        wire.leave()
        await (await fake.exchange()).until_closed()
    async with connect(url) as wire:
        await wire.post()
        asked = await fake.exchange(1)
        wire.leave()
        await asked.until_closed()


@pytest.mark.parametrize("towards_proxy", TOWARDS_PROXY)
async def test_heartbeats_pass(
    towards_proxy: str, fake: FakeVllm, lastword: StartLastword, nginx: StartNginx
) -> None:
    """A silent stream's heartbeats reach the client, before the first event and between two."""
    proxy = await lastword(heartbeat_s=0.05)
    url = await nginx(proxy.url, towards_proxy)
    fake.script(stream(EVENTS, gated=True))
    async with connect(url) as wire:
        await wire.post()
        answer = await wire.head()
        await read_until(wire, answer, HEARTBEAT)
        fake.gate("0").open()
        await read_until(wire, answer, EVENTS[0] + HEARTBEAT)
        for number in range(1, len(EVENTS)):
            fake.gate(str(number)).open()
        fake.gate("ending").open()
        await wire.body(answer)
    assert answer.body.replace(HEARTBEAT, b"") == corrected(b"".join(EVENTS))
    assert answer.ending == "clean"


@pytest.mark.parametrize("towards_proxy", TOWARDS_PROXY)
async def test_run_is_followed_and_resumed(
    towards_proxy: str, fake: FakeVllm, lastword: StartLastword, nginx: StartNginx
) -> None:
    """A background response is followed live through nginx, and taken up with its cursor."""
    api = FakeResponsesApi(fake, gated=True)
    proxy = await lastword(background="upstream")
    url = await nginx(proxy.url, towards_proxy)
    body = json.dumps({"stream": True, "background": True, "request_id": "r"}).encode()
    async with connect(url) as wire:
        await wire.post(body)
        await fake.until(lambda: "r" in api.runs)
        api.step("r", 3)
        begun = await wire.head()
        await fake.until(lambda: len(api.runs["r"].events) == 3)
        await read_until(wire, begun, api.runs["r"].events[2])
        wire.leave()
    async with connect(url) as wire:
        await wire.request("GET", f"{RESPONSES}/r?stream=true&starting_after=2")
        answer = await wire.head()
        api.step("r", 100)
        await wire.body(answer)
    assert answer.ending == "clean"
    assert begun.body + answer.body == b"".join(api.runs["r"].events)
