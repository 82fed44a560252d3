"""An upstream that speaks TLS is verified, and told apart from one that is merely down."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

import pytest
import trustme

from tests.contract.raw_server import RawServer
from tests.e2e.wire import Answer, exchange
from tests.prometheus import total

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Lastword, StartLastword

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def upstream_of(authority: trustme.CA, host: str) -> RawServer:
    """Give an upstream whose certificate that authority made, for that host."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(host).configure_cert(context)
    return RawServer(context)


async def start(lastword: StartLastword, server: RawServer, ca_file: Path | None) -> Lastword:
    """Start a proxy in front of it."""
    upstream = f"https://127.0.0.1:{server.port}/prefix"
    return await lastword(upstream=upstream, upstream_ca_file=ca_file)


async def ask(proxy: Lastword, server: RawServer) -> Answer:
    """Ask it for something through the proxy; an upstream that is verified answers ok."""

    async def serve() -> None:
        peer = await server.accept()
        head = await peer.head()
        peer.send(OK if head.startswith(b"GET /prefix/v1/models HTTP/1.1\r\n") else b"no\r\n\r\n")

    serving = asyncio.create_task(serve())
    try:
        return await exchange(proxy.url, "GET", "/v1/models")
    finally:
        serving.cancel()


@pytest.fixture
def authority(tmp_path: Path) -> tuple[trustme.CA, Path]:
    """Make an authority that no system knows, and its PEM file."""
    authority = trustme.CA()
    path = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(str(path))
    return authority, path


async def test_upstream_of_a_known_authority_is_asked(
    authority: tuple[trustme.CA, Path], lastword: StartLastword
) -> None:
    """With the file of its authority, an upstream of that name answers."""
    async with upstream_of(authority[0], "127.0.0.1") as server:
        proxy = await start(lastword, server, authority[1])
        assert (await ask(proxy, server)).body == b"ok"


@pytest.mark.parametrize(
    ("host", "knows", "words"),
    [
        pytest.param("127.0.0.1", False, "unable to get local issuer", id="unknown authority"),
        pytest.param("127.0.0.2", True, "IP address mismatch", id="another host"),
        pytest.param("localhost", True, "IP address mismatch", id="a name for an address"),
    ],
)
async def test_upstream_that_cannot_be_verified_is_502(
    authority: tuple[trustme.CA, Path],
    lastword: StartLastword,
    *,
    host: str,
    knows: bool,
    words: str,
) -> None:
    """Nothing is sent to it, and the error says what is wrong and which options help."""
    async with upstream_of(authority[0], host) as server:
        proxy = await start(lastword, server, authority[1] if knows else None)
        answer = await ask(proxy, server)
        assert answer.status == 502
        assert await total(proxy.admin_url, "lastword_upstream_errors_total", kind="tls") == 1
        message = answer.json()["error"]["message"]
        assert words in message
        assert "--upstream-ca-file" in message
        assert f"https://127.0.0.1:{server.port}/prefix" in message
