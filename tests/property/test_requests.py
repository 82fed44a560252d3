"""Whatever a client sends: an answer in form or none, an end, and nothing strange upstream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.gateway import server
from tests.e2e.raw import GET, chunked, head, send
from tests.e2e.wire import RESPONSES, Answer, Cut, Wire, connect
from tests.fake_scripts import cut, echo
from tests.loops import on_loops

if TYPE_CHECKING:
    from tests.conftest import Lastword, StartLastword
    from tests.fake_connection import Request
    from tests.fake_vllm import FakeVllm

pytest_generate_tests = on_loops("uvloop")

HOP_BY_HOP = (
    *("connection", "keep-alive", "proxy-connection", "te", "trailer", "upgrade", "expect"),
    "http2-settings",
)
PATH = re.compile(rb"/(?!/)[!-~]*")
LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+: ?[\t\x20-\x7e\x80-\xff]*")

sound = st.sampled_from(
    [
        GET,
        head(b"Content-Length: 3") + b"abc",
        chunked(b"3\r\nabc\r\n1;x=y\r\nd\r\n0\r\nX-A: 1\r\n\r\n"),
        head(b"Connection: upgrade", b"Upgrade: h2c", b"Content-Length: 3") + b"abc",
        head(b"Connection: X-A, close", b"X-A: 1", b"TE: trailers", b"Trailer: X-B"),
        head(b"Expect: 100-continue", b"Content-Length: 2") + b"{}",
        head(b"Content-Length: 2").replace(b"/x", RESPONSES.encode()) + b"{}",
        head(first=b"GET /x HTTP/1.0") + b"",
    ]
)
words = st.sampled_from(
    [
        *(
            b"\r\n",
            b"\n",
            b"\r",
            b"\0",
            b" ",
            b"\t",
            b":",
            b"\r\n\r\n",
            b"\r\n ",
            b"%2e%2e/",
            b"//",
        ),
        *(b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n"),
        *(b"Transfer-Encoding: x\r\n", b"Host: b\r\n", b"Connection: close\r\n", b"Expect: x\r\n"),
        *(b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"HTTP/1.0", b"HTTP/2.0", b"\xff"),
        *(b"X-A: " + b"a" * 400, b"0\r\n\r\n", b"5\r\n", b"GET ", b"CONNECT ", b"http://b/", b"#"),
    ]
)
inserts = st.one_of(words, st.binary(max_size=4))


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Draw requests, one behind another, with a few bytes put in, taken out or changed."""
    data = b"".join(draw(st.lists(sound, min_size=1, max_size=3)))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(data)))
        data = data[:place] + draw(inserts) + data[place + draw(st.sampled_from([0, 0, 0, 1, 5])) :]
    return data


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Draw what one client sends, cut into pieces."""
    data = draw(st.one_of(mutated(), st.lists(inserts, max_size=20).map(b"".join)))
    places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=4)))
    return cut(data, places)


async def answers(wire: Wire) -> list[Answer]:
    """Read every answer of a connection until it ends; each must be whole, nothing between them."""
    got: list[Answer] = []
    while True:
        try:
            answer = await wire.head()
        except Cut as end:
            if getattr(end.__cause__, "partial", b""):
                raise
            return got
        if answer.status != 100:
            got.append(await wire.body(answer))
            assert answer.ending == "clean"


async def converse(url: str, pieces: list[bytes]) -> list[Answer]:
    """Send the pieces as far as they are taken, and read all that is answered."""
    async with connect(url) as wire:
        reading = asyncio.create_task(answers(wire))
        with contextlib.suppress(ConnectionError):  # refused before it was all sent
            await send(wire, pieces)
        return await reading


def check_answer(answer: Answer) -> bool:
    """Check that an answer is upstream's or an error in OpenAI's shape; say which."""
    assert answer.values("content-type") == [b"application/json"]
    if answer.status == 200:
        return True
    assert 400 <= answer.status < 500 or answer.status == 505, answer.body
    if answer.body:
        error = json.loads(answer.body)["error"]
        assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, answer.status)
    return False


def check_request(request: Request) -> None:
    """Check that what went up has one meaning: form, one Host, one framing, no hop's business."""
    first, *lines = request.raw_head[:-4].split(b"\r\n")
    assert PATH.fullmatch(request.target), first
    assert first.endswith(b" HTTP/1.1"), first
    for line in lines:
        assert LINE.fullmatch(line), line
    assert len(request.values("host")) == 1
    assert len(request.values("content-length") + request.values("transfer-encoding")) <= 1
    for name in HOP_BY_HOP:
        assert not request.values(name), name
    assert request.trailers == b""


@pytest.fixture
async def impatient(
    fake: FakeVllm, lastword: StartLastword, monkeypatch: pytest.MonkeyPatch
) -> Lastword:
    """Start a proxy that gives its clients little time."""
    monkeypatch.setattr(server, "CLIENT_KEEPALIVE_S", 0.3)
    fake.handler = echo
    return await lastword(header_timeout_s=0.1, write_stall_s=0.1, max_header_bytes=2000)


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,  # one proxy bears all examples, as it must
    ],
)
@given(clients=st.lists(conversations(), min_size=4, max_size=12))
async def test_no_bytes_do_harm(
    clients: list[list[bytes]], fake: FakeVllm, impatient: Lastword
) -> None:
    """Every connection ends by itself, with whole answers; upstream sees sound requests alone."""
    before = len(fake.exchanges)
    told = await asyncio.gather(*(converse(impatient.url, pieces) for pieces in clients))
    passed = [check_answer(answer) for got in told for answer in got].count(True)
    asked = fake.exchanges[before:]
    for exchange in asked:
        check_request(exchange.request)
    assert passed <= len(asked)
    assert (await converse(impatient.url, [GET]))[0].status == 200
