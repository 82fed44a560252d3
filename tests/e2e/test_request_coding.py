"""A compressed create goes up as plain JSON; other bodies pass as they came."""

from __future__ import annotations

import gzip
import sys
import zlib
from typing import TYPE_CHECKING

import pytest

from tests.e2e.background import create, expected
from tests.e2e.wire import RESPONSES, STREAM, Answer, connect, exchange, post_stream
from tests.fake_responses_api import FakeResponsesApi
from tests.fake_scripts import echo

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import StartLastword
    from tests.fake_vllm import FakeVllm

LIMIT = 300_000
BIG = b'{"input":"' + bytes(range(0x20, 0x7F)).replace(b'"', b"") * 2_000 + b'"}'
SKIPPABLE = b"\x50\x2a\x4d\x18\x05\x00\x00\x00hello"


def _raw_deflate(data: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return encoder.compress(data) + encoder.flush()


def assert_refused(answer: Answer, status: int, *words: str) -> None:
    """Check that a request was refused in OpenAI's shape."""
    assert answer.status == status, answer
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", status)
    for word in words:
        assert word in error["message"], error["message"]


@pytest.mark.parametrize("mode", ["on", "observe", "off"])
async def test_create_is_decoded(mode: str, fake: FakeVllm, lastword: StartLastword) -> None:
    """However it was compressed and sent, vLLM gets the JSON and its length, and no coding."""
    proxy = await lastword(correct=mode)
    fake.handler = echo
    half = len(BIG) // 2
    parts = BIG[:half], BIG[half:]
    for coding, body in [
        ("gzip", gzip.compress(BIG)),
        ("X-GZip", b"".join(map(gzip.compress, parts))),
        ("deflate", zlib.compress(BIG)),
        ("deflate", _raw_deflate(BIG)),
        ("zstd", zstd.compress(BIG)),
        ("zstd", SKIPPABLE + b"".join(map(zstd.compress, parts)) + zstd.compress(b"")),
        ("identity, zstd,", zstd.compress(BIG)),
        ("identity", BIG),
    ]:
        for chunked in (False, True):
            async with connect(proxy.url) as wire:
                headers = [("Content-Encoding", coding)]
                if chunked:
                    await wire.request(
                        "POST", RESPONSES, [*headers, ("Transfer-Encoding", "chunked")]
                    )
                    for at in range(0, len(body), 20_000):
                        piece = body[at : at + 20_000]
                        await wire.send(b"%x\r\n%b\r\n" % (len(piece), piece))
                    await wire.send(b"0\r\n\r\n")
                else:
                    await wire.post(body, headers)
                assert (await wire.answer()).status == 200, coding
            got = fake.requests[-1]
            assert got.body == BIG, coding
            assert got.values("content-encoding") == []
            assert got.values("transfer-encoding") == []
            assert got.values("content-length") == [str(len(BIG)).encode()]


@pytest.mark.parametrize("mode", ["upstream", "proxy"])
async def test_compressed_background_create(
    mode: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A background response may be asked for in zstd, too."""
    fake.handler = FakeResponsesApi(fake)
    proxy = await lastword(background=mode)
    body = zstd.compress(b'{"model":"tiny","input":"x","stream":true,"background":true}')
    got = await post_stream(proxy.url, body, [("Content-Encoding", "zstd")])
    plain = await create(proxy.url)
    assert got.status == plain.status == 200
    assert len(got.body.split(b"\n\n")) == len(expected()) + 1
    assert fake.requests[0].values("content-encoding") == []


@pytest.mark.parametrize("coding", ["br", "compress", "gzip, zstd", "gzip, gzip", "chunked", "x"])
async def test_unknown_coding_is_415(coding: str, fake: FakeVllm, lastword: StartLastword) -> None:
    """The answer names what can be sent (RFC 9110, 15.5.16), and vLLM is not asked."""
    proxy = await lastword()
    got = await post_stream(proxy.url, STREAM, [("Content-Encoding", coding)])
    assert_refused(got, 415, coding, "gzip, deflate and zstd")
    assert got.values("accept-encoding") == [b"gzip, deflate, zstd"]
    assert not fake.requests


async def test_refused_before_the_body_was_sent(fake: FakeVllm, lastword: StartLastword) -> None:
    """Nobody reads the rest, so the connection ends with the answer."""
    proxy = await lastword()
    async with connect(proxy.url) as wire:
        headers = [("Content-Encoding", "br"), ("Content-Length", "99"), ("Expect", "100-continue")]
        await wire.request("POST", RESPONSES, headers)
        got = await wire.answer()
        assert_refused(got, 415)
        assert got.values("connection") == [b"close"]
        assert await wire.at_eof()


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        pytest.param("gzip", STREAM, id="not gzip"),
        pytest.param("gzip", gzip.compress(STREAM)[:-1], id="gzip cut short"),
        pytest.param("gzip", gzip.compress(STREAM) + b"{}", id="gzip and more"),
        pytest.param("gzip", b"", id="no gzip at all"),
        pytest.param("deflate", zlib.compress(STREAM)[:-1], id="deflate cut short"),
        pytest.param("deflate", zlib.compress(STREAM) * 2, id="deflate and more"),
        pytest.param("zstd", STREAM, id="not zstd"),
        pytest.param("zstd", zstd.compress(STREAM)[:-1], id="zstd cut short"),
        pytest.param("zstd", zstd.compress(STREAM) + b"{}", id="zstd and more"),
        pytest.param(
            "zstd",
            zstd.compress(BIG, options={zstd.CompressionParameter.window_log: 24})[:9] + b"\0" * 20,
            id="broken within",
        ),
    ],
)
async def test_broken_body_is_400(
    coding: str, body: bytes, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A body that is not what it says, or not whole, never reaches vLLM."""
    proxy = await lastword()
    got = await post_stream(proxy.url, body, [("Content-Encoding", coding)])
    assert_refused(got, 400, "Content-Encoding")
    assert not fake.requests


async def test_zstd_window_is_limited(fake: FakeVllm, lastword: StartLastword) -> None:
    """A frame that asks for more than RFC 9659's 8 MiB of window is refused before it gets it."""
    proxy = await lastword()
    encoder = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 24})
    body = encoder.compress(b"{", mode=encoder.FLUSH_BLOCK) + encoder.compress(
        b"}", mode=encoder.FLUSH_FRAME
    )
    got = await post_stream(proxy.url, body, [("Content-Encoding", "zstd")])
    assert_refused(got, 400, "memory")


@pytest.mark.parametrize(
    ("coding", "compress"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", zstd.compress)],
)
async def test_limit_counts_the_decoded_bytes(
    coding: str,
    compress: Callable[[bytes], bytes],
    fake: FakeVllm,
    lastword: StartLastword,
) -> None:
    """As many bytes as are allowed pass; one more, or a bomb, is 413."""
    proxy = await lastword(max_request_body_bytes=LIMIT)
    fake.handler = echo
    headers = [("Content-Encoding", coding)]
    assert (await post_stream(proxy.url, compress(bytes(LIMIT)), headers)).status == 200
    for size in (LIMIT + 1, 50_000_000):
        got = await post_stream(proxy.url, compress(bytes(size)), headers)
        assert_refused(got, 413, str(LIMIT))
    assert len(fake.requests) == 1


async def test_other_bodies_pass_as_they_came(fake: FakeVllm, lastword: StartLastword) -> None:
    """On every other path a coding is between client and vLLM."""
    proxy = await lastword()
    fake.handler = echo
    for target in ("/v1/chat/completions", RESPONSES + "/resp_1/cancel"):
        for coding, body in [("gzip", gzip.compress(BIG)), ("br", b"\x8b\0"), ("zstd", b"broken")]:
            headers = [("Content-Encoding", coding)]
            assert (await exchange(proxy.url, "POST", target, headers, body)).status == 200
            assert fake.requests[-1].body == body
            assert fake.requests[-1].values("content-encoding") == [coding.encode()]
