"""Upstream's failures as the proxy's own errors."""

from __future__ import annotations

import errno
from unittest import mock

import httpx
import pytest

from proxy.errors import OriginError, RequestError
from proxy.settings import load_settings
from proxy.upstream.client import UpstreamClient


def connect_error(number: int) -> httpx.ConnectError:
    """Make the error of a connection that the system refused."""
    error = httpx.ConnectError("no connection")
    error.__cause__ = OSError(number, "the system says no")
    return error


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (connect_error(errno.ECONNREFUSED), 502, "cannot be reached"),
        (connect_error(errno.EMFILE), 503, "run out of file descriptors"),
        (connect_error(errno.ENFILE), 503, "run out of file descriptors"),
        (httpx.ConnectTimeout("slow"), 504, "did not accept a connection in time"),
        (httpx.ReadTimeout("slow"), 504, "did not answer in time"),
        (httpx.RemoteProtocolError("garbage"), 502, "broke off before it answered"),
        (httpx.ReadError("reset"), 502, "broke off before it answered"),
        (httpx.LocalProtocolError("a bad header"), 400, "cannot be passed on: a bad header"),
    ],
    ids=["refused", "EMFILE", "ENFILE", "slow", "no head", "garbage", "reset", "no HTTP"],
)
async def test_errors(error: Exception, status: int, words: str) -> None:
    """Each kind of failure has its status and a sentence that says whose it is."""
    client = UpstreamClient(load_settings(upstream="http://127.0.0.1:1"))
    client._transport = mock.Mock(handle_async_request=mock.AsyncMock(side_effect=error))

    with pytest.raises(RequestError) as caught:
        await client.open("GET", b"/", [(b"host", b"x")], b"")

    assert caught.value.status == status
    assert words in caught.value.message
    assert (b"retry-after" in dict(caught.value.headers)) is (status == 503)


@pytest.mark.parametrize(
    "target",
    [b"", b"*", b"x", b"http://evil.example/x", b"evil.example:443", b"//evil.example/x", b"\\x"],
)
@pytest.mark.parametrize("upstream", ["http://127.0.0.1:1", "http://127.0.0.1:1/prefix"])
async def test_target_that_is_no_path_is_never_sent(upstream: str, target: bytes) -> None:
    """Whoever asks: what could name another origin is a fault of ours, found before a byte."""
    client = UpstreamClient(load_settings(upstream=upstream))
    client._transport = transport = mock.Mock(handle_async_request=mock.AsyncMock())

    with pytest.raises(OriginError, match="is no path"):
        await client.open("GET", target, [(b"host", b"x")], b"")

    transport.handle_async_request.assert_not_called()
