"""The files for nginx and Envoy, with nothing but their ports replaced, before the real proxy."""

from __future__ import annotations

import ipaddress
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Protocol

import pytest

from tests.deploy.tools import DEPLOY, tool
from tests.e2e.wire import connect
from tests.fake_scripts import echo, stream, vllm_events
from tests.front import assert_events_arrive_promptly, free_port, listening, read_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.conftest import Lastword, StartLastword
    from tests.fake_vllm import FakeVllm

    class StartFront(Protocol):
        """Starts what the file in deploy/ describes before a proxy, and gives its URL."""

        async def __call__(self, proxy: Lastword) -> str:
            """Start it."""


EVENTS = vllm_events()
# Around the snippet, what a distribution's nginx.conf has, but in a folder of the test's.
NGINX_CONF = """
daemon off;
pid {folder}/nginx.pid;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  include {folder}/lastword.conf;
}}
"""


def replaced(text: str, ports: dict[str, str]) -> str:
    """Replace ports in a file; each must be there."""
    for old, new in ports.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def nginx_command(folder: Path, proxy: str, admin: str, port: int) -> list[str]:
    """Write nginx's files and say how it is started."""
    binary = tool("nginx", "Debian: apt-get install nginx-light")
    snippet = (DEPLOY / "nginx" / "lastword.conf").read_text()
    (folder / "lastword.conf").write_text(
        replaced(snippet, {"127.0.0.1:8080": f"127.0.0.1:{proxy}", "listen 8000": f"listen {port}"})
    )
    (folder / "nginx.conf").write_text(NGINX_CONF.format(folder=folder))
    log = str(folder / "error.log")
    return [binary, "-c", str(folder / "nginx.conf"), "-p", str(folder), "-e", log]


def envoy_command(folder: Path, proxy: str, admin: str, port: int) -> list[str]:
    """Write Envoy's file and say how it is started."""
    binary = tool("envoy")
    text = (DEPLOY / "envoy" / "envoy.yaml").read_text()
    ports = {"8080": proxy, "8081": admin, "8000": str(port)}
    (folder / "envoy.yaml").write_text(
        replaced(
            text, {f"port_value: {old}\n": f"port_value: {new}\n" for old, new in ports.items()}
        )
    )
    # Without --base-id two Envoys on one machine do not start.
    return [binary, "-c", str(folder / "envoy.yaml"), "--use-dynamic-base-id", "--concurrency", "1"]


@pytest.fixture(params=[nginx_command, envoy_command], ids=["nginx", "envoy"])
async def front(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StartFront]:
    """Give a function that starts what stands before the proxy."""
    async with AsyncExitStack() as stack:

        async def start(proxy: Lastword) -> str:
            port = free_port()
            proxy_port, admin_port = (
                url.rpartition(":")[2] for url in (proxy.url, proxy.admin_url)
            )
            command = request.param(tmp_path, proxy_port, admin_port, port)
            await stack.enter_async_context(listening(port, *command))
            return f"http://127.0.0.1:{port}"

        yield start


async def test_events_arrive_promptly(
    fake: FakeVllm, lastword: StartLastword, front: StartFront
) -> None:
    """Each event is with the client before the next is sent; the stream is corrected, and clean."""
    await assert_events_arrive_promptly(fake, await front(await lastword()))


async def test_lost_upstream_is_seen_by_the_client(
    fake: FakeVllm, lastword: StartLastword, front: StartFront
) -> None:
    """The client gets response.failed, and then its body is cut."""
    url = await front(await lastword())
    fake.script(stream(EVENTS[:5], ending="cut"))
    async with connect(url) as wire:
        await wire.post()
        answer = await wire.answer()
    assert answer.body.startswith(b"".join(EVENTS[:5]) + b"event: response.failed\n")
    assert answer.ending != "clean"


async def test_client_that_leaves_closes_upstream(
    fake: FakeVllm, lastword: StartLastword, front: StartFront
) -> None:
    """VLLM stops generating for a client that has left."""
    url = await front(await lastword())
    fake.script(stream(EVENTS[:3], ending="hang"))
    async with connect(url) as wire:
        await wire.post()
        answer = await wire.head()
        await read_until(wire, answer, EVENTS[2])
        wire.leave()
        await (await fake.exchange()).until_closed()


async def test_request_arrives_whole(
    fake: FakeVllm, lastword: StartLastword, front: StartFront
) -> None:
    """A large body, the raw target and what is known of the client reach vLLM."""
    url = await front(await lastword(trusted_proxies="127.0.0.1"))
    fake.script(echo)
    target = "/v1/models/Qwen%2FQwen3-8B?a=%2F+b"
    body = b"x" * 3_000_000
    async with connect(url) as wire:
        await wire.request("POST", target, body=body)
        assert (await wire.answer()).status == 200
    request = fake.requests[0]
    assert request.target == target.encode()
    (forwarded,) = request.values("x-forwarded-for")
    # Envoy gives a client on loopback this machine's address. The last is the front itself.
    client, _, seen_by_proxy = forwarded.partition(b", ")
    assert ipaddress.ip_address(client.decode())
    assert seen_by_proxy == b"127.0.0.1"
    assert request.values("x-forwarded-proto") == [b"http"]
    assert request.values("host") == [url.removeprefix("http://").encode()]
