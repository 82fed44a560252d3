"""Everything but the terminal event passes as if the proxy were not there."""

from __future__ import annotations

import gzip
import hashlib
import json
from typing import TYPE_CHECKING

import pytest

from tests.captures import VERSIONS, all_captures
from tests.e2e.wire import RESPONSES, STREAM, connect, exchange, post_stream
from tests.fake_scripts import EVENT_STREAM, JSON, answer, cut, echo, play, stream, vllm_events

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import Exchange, FakeVllm

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "HEAD"]
)
async def test_methods_pass(method: str, fake: FakeVllm, lastword: StartLastword) -> None:
    """The proxy has no opinion on methods, also not on its own two routes."""
    proxy = await lastword()
    body = b'{"detail":"Method Not Allowed"}'
    fake.handler = answer(405, [*JSON, ("allow", "POST")], body)
    for target in ("/tokenize", RESPONSES, RESPONSES + "/resp_1"):
        got = await exchange(proxy.url, method, target)
        assert (fake.requests[-1].method, fake.requests[-1].target) == (method, target.encode())
        assert (got.status, got.values("allow")) == (405, [b"POST"])
        assert got.body == (b"" if method == "HEAD" else body)


TARGETS = [
    "/v1/models/Qwen%2FQwen3-8B?a=%2F+b%20c&a=2",
    "/v1/models/Qwen%2fQwen3-8B",
    "/?",
    "/v1/files?",
    "/v1/files?x&empty=&=y&&",
    "/a//b/",
    "/docs/",
    "/a;b=c/@:,'()*!~$&+=/%E2%82%AC/%e2?q=a?b/c&d=%zz",
    "/v1/responses/resp_1?include%5B%5D=message.output_text.logprobs&stream=false",
    "/v1/responses/",
    "/%76%31/%6Dodels",
    '/search?q=[1]|{2}^`"<>',
    "/x?redirect=http://elsewhere/../y",
    "/files/a..b/...",
]


async def test_targets_keep_their_bytes(fake: FakeVllm, lastword: StartLastword) -> None:
    """Path and query go up as they came: nothing is decoded, encoded, folded or sorted."""
    proxy = await lastword()
    fake.handler = echo
    for target in TARGETS:
        assert (await exchange(proxy.url, "GET", target)).status == 200, target
        assert fake.requests[-1].target == target.encode()


async def test_status_and_body_pass(fake: FakeVllm, lastword: StartLastword) -> None:
    """Every status stays what it is, with its body and Retry-After, also for a stream request."""
    proxy = await lastword()
    body = b'{"error":{"message":"why","type":"t","param":null,"code":1}}'
    for code in (200, 201, 400, 404, 418, 429, 500, 503, 599):
        fake.handler = answer(code, [*JSON, ("retry-after", "7")], body)
        for got in [await post_stream(proxy.url), await exchange(proxy.url, "GET", "/v1/models")]:
            assert (got.status, got.body, got.values("retry-after")) == (code, body, [b"7"])
            assert got.values("content-type") == [b"application/json"]
            assert got.values("content-length") == [str(len(body)).encode()]


@pytest.mark.parametrize("code", [204, 304])
async def test_answers_without_a_body(code: int, fake: FakeVllm, lastword: StartLastword) -> None:
    """204 and 304 have no body; the connection is good for the next request."""
    proxy = await lastword()
    fake.script(answer(code, [("etag", '"x"')]), echo)
    async with connect(proxy.url) as wire:
        await wire.request("GET", "/a")
        got = await wire.answer()
        assert (got.status, got.values("etag"), got.body) == (code, [b'"x"'], b"")
        await wire.request("GET", "/b")
        assert (await wire.answer()).json()["target"] == "/b"


async def test_head_keeps_the_length_of_the_body_that_is_not_there(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """HEAD tells the length and sends nothing; the connection is good for the next request."""
    proxy = await lastword()
    fake.script(answer(200, JSON, b"x" * 1234), echo)
    async with connect(proxy.url) as wire:
        await wire.request("HEAD", "/a")
        got = await wire.answer(method="HEAD")
        assert got.values("content-length") == [b"1234"]
        await wire.request("GET", "/b")
        assert (await wire.answer()).json()["target"] == "/b"


async def test_redirect_is_not_followed(fake: FakeVllm, lastword: StartLastword) -> None:
    """The client gets vLLM's 307 and its Location, untouched."""
    proxy = await lastword()
    fake.script(answer(307, [("location", "http://127.0.0.1:8200/v1/responses")]))
    got = await exchange(proxy.url, "POST", RESPONSES + "/", body=b"{}")
    assert (got.status, got.values("location")) == (307, [b"http://127.0.0.1:8200/v1/responses"])
    assert len(fake.requests) == 1


@pytest.mark.parametrize("version", VERSIONS)
async def test_captures_that_are_no_event_stream(
    version: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Every recorded answer that is no event stream arrives with the same status and body."""
    proxy = await lastword()
    captures = [x for x in all_captures() if x.version == version and not x.is_event_stream]
    for capture in captures:
        fake.script(play(capture))
        target = capture.target.replace("<id of the first capture>", "resp_1")
        body = b"{}" if capture.method == "POST" else None
        got = await exchange(proxy.url, capture.method, target, body=body)
        assert (got.status, got.body) == (capture.status, capture.body), capture.id
        for name in ("content-type", "content-length", "allow", "location"):
            sent = [value.encode() for key, value in capture.headers if key.lower() == name]
            assert got.values(name) == sent, capture.id


async def test_other_streams_are_not_looked_at(fake: FakeVllm, lastword: StartLastword) -> None:
    """Streams of other routes pass byte for byte, also if they look like ours or have no end."""
    proxy = await lastword()
    body = b"".join(vllm_events()) + b"data: half an event of response.completed"
    targets = [CHAT, RESPONSES + "/resp_1/cancel", "/v1/responses_of_mine", "/x/v1/responses"]
    for target in targets:
        fake.script(stream(cut(body, range(50, len(body), 50))))
        got = await exchange(proxy.url, "POST", target, body=STREAM)
        assert (got.body, got.ending) == (body, "clean"), target


async def test_other_streams_pass_at_once(fake: FakeVllm, lastword: StartLastword) -> None:
    """A chunk of a chat stream goes on before the next is sent, wherever it was cut."""
    proxy = await lastword()
    pieces = [b'data: {"choi', b'ces":[]}\n', b"\n", b"data: [DONE]\n\n"]
    fake.script(stream(pieces, gated=True))
    async with connect(proxy.url) as wire:
        await wire.request("POST", CHAT, body=STREAM)
        await wire.head()
        for number, piece in enumerate(pieces):
            fake.gate(str(number)).open()
            assert await wire.chunk() == piece
        fake.gate("ending").open()
        assert await wire.chunk() == b""


async def test_compressed_answer_passes_as_it_came(fake: FakeVllm, lastword: StartLastword) -> None:
    """What upstream compressed stays compressed, with the header that says so."""
    proxy = await lastword()
    packed = gzip.compress(b'{"data":[]}' * 100)
    fake.handler = answer(200, [*JSON, ("content-encoding", "gzip")], packed)
    for method, target in [("GET", "/v1/models"), ("POST", RESPONSES)]:
        got = await exchange(proxy.url, method, target, [("Accept-Encoding", "gzip")], b"{}")
        assert (got.body, got.values("content-encoding")) == (packed, [b"gzip"])
    assert fake.requests[0].values("accept-encoding") == [b"gzip"]


@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "in chunks"])
async def test_large_upload_streams(
    chunked: bool,  # noqa: FBT001 -- a parameter of the test
    fake: FakeVllm,
    lastword: StartLastword,
) -> None:
    """Upstream gets the first part of 50 MB before the client has sent the last."""
    proxy = await lastword()
    part = bytes(range(256)) * 2**12  # 1 MiB
    size = 50 * len(part)

    async def digest(exchange: Exchange) -> None:
        body = await exchange.read_body()
        await exchange.answer(200, body=hashlib.sha256(body).hexdigest().encode())

    fake.script(digest)
    framing = ("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(size))
    piece = b"%x\r\n%b\r\n" % (len(part), part) if chunked else part
    async with connect(proxy.url) as wire:
        await wire.request("POST", "/v1/audio/transcriptions", [framing])
        await wire.send(piece)
        asked = await fake.exchange()
        await fake.until(lambda: len(asked.request.body) == len(part))
        for _ in range(49):
            await wire.send(piece)
        await wire.send(b"0\r\n\r\n" if chunked else b"")
        assert (await wire.answer()).body == hashlib.sha256(part * 50).hexdigest().encode()
    if chunked:
        assert asked.request.values("transfer-encoding") == [b"chunked"]
    else:
        assert asked.request.values("content-length") == [str(size).encode()]


async def test_early_answer_arrives_during_the_upload(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """An upstream that refuses an upload by its head is heard before the upload is through."""
    proxy = await lastword()

    async def refuse(exchange: Exchange) -> None:
        await exchange.respond(413, [("content-length", "3"), ("connection", "close")])
        await exchange.send(b"big")
        await exchange.wait_closed()

    fake.script(refuse)
    async with connect(proxy.url) as wire:
        await wire.request("POST", "/v1/files", [("Content-Length", "1000000")])
        await wire.send(b"x" * 1000)
        got = await wire.answer()
        assert (got.status, got.body) == (413, b"big")


async def test_request_bodies_keep_their_bytes(fake: FakeVllm, lastword: StartLastword) -> None:
    """Also the body of a create goes up as it came: spacing, escapes, invalid JSON."""
    proxy = await lastword()
    fake.handler = echo
    for body in [
        b"",
        b'{ "stream" :false, "x": 1e400 , "\\u0061":"\xc3\xa9"}',
        b"{not json",
        b"[]",
    ]:
        for target in (RESPONSES, CHAT):
            got = await exchange(proxy.url, "POST", target, [], body)
            assert got.json()["body"].encode("latin-1") == body


async def test_interim_answers_are_not_the_answer(fake: FakeVllm, lastword: StartLastword) -> None:
    """A 1xx from upstream comes before the answer; it is not taken for it."""
    proxy = await lastword()

    async def hints(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.send_raw(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
        await exchange.answer(200, body=b"yes")

    fake.handler = hints
    for target in ("/v1/models", RESPONSES):
        got = await exchange(proxy.url, "POST", target, body=b"{}")
        assert (got.status, got.body) == (200, b"yes")


async def test_trailers_of_an_answer_are_dropped(fake: FakeVllm, lastword: StartLastword) -> None:
    """Trailers end with the hop that they came on; the connection is good afterwards."""
    proxy = await lastword()

    async def trailing(exchange: Exchange) -> None:
        await exchange.respond(200, JSON)
        await exchange.send(b"{}")
        await exchange.send_raw(b"0\r\nx-checksum: 1\r\n\r\n")
        exchange.ended = True

    fake.script(trailing, echo)
    async with connect(proxy.url) as wire:
        await wire.request("GET", "/a")
        got = await wire.answer()
        assert (got.body, got.ending) == (b"{}", "clean")
        await wire.request("GET", "/b")
        assert (await wire.answer()).json()["target"] == "/b"


async def test_event_stream_of_a_plain_call(fake: FakeVllm, lastword: StartLastword) -> None:
    """A create without stream gets vLLM's JSON, byte for byte."""
    proxy = await lastword()
    body = json.dumps({"status": "incomplete", "type": "response.completed"}, indent=3).encode()
    fake.script(answer(200, JSON, body))
    got = await post_stream(proxy.url, b'{"input":"x"}')
    assert got.body == body
    assert got.values("x-accel-buffering") == []
    assert EVENT_STREAM[0][1].encode() not in got.values("content-type")
