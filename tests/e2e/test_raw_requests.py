"""What goes through and what does not, byte for byte: a table of requests that attack framing.

Each row is sent whole, in two pieces and byte by byte, on both loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.raw import CUTS, GET, assert_refused, chunked, head, send, talk
from tests.e2e.wire import connect
from tests.fake_scripts import echo
from tests.loops import on_loops

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import FakeVllm

pytest_generate_tests = on_loops("asyncio", "uvloop")


CONTROL_BYTES = [byte for byte in (*range(0x20), 0x7F) if byte != 0x09]

LENGTHS = {
    "length and chunked": head(b"Content-Length: 3", b"Transfer-Encoding: chunked") + b"0\r\n\r\n",
    "chunked and length": head(b"Transfer-Encoding: chunked", b"Content-Length: 3") + b"0\r\n\r\n",
    "the same length twice": head(b"Content-Length: 3", b"Content-Length: 3") + b"abc",
    "two lengths": head(b"Content-Length: 3", b"Content-Length: 4") + b"abcd",
    "list of lengths": head(b"Content-Length: 3, 3") + b"abc",
    "plus": head(b"Content-Length: +3") + b"abc",
    "minus": head(b"Content-Length: -3") + b"abc",
    "hexadecimal": head(b"Content-Length: 0x3") + b"abc",
    "underscore": head(b"Content-Length: 1_0") + b"abc",
    "space within": head(b"Content-Length: 3 3") + b"abc",
    "no length": head(b"Content-Length:") + b"abc",
    "more than 64 bits": head(b"Content-Length: 99999999999999999999999") + b"abc",
    "zeros without end": head(b"Content-Length: " + b"0" * 5000 + b"3") + b"abc",
    "space before the colon": head(b"Content-Length : 3") + b"abc",
}
CODINGS = {
    "gzip, chunked": head(b"Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n",
    "chunked, gzip": head(b"Transfer-Encoding: chunked, gzip") + b"0\r\n\r\n",
    "gzip": head(b"Transfer-Encoding: gzip") + b"0\r\n\r\n",
    "identity": head(b"Transfer-Encoding: identity") + b"0\r\n\r\n",
    "nothing": head(b"Transfer-Encoding:") + b"0\r\n\r\n",
    "a comma first": head(b"Transfer-Encoding: , chunked") + b"0\r\n\r\n",
    "chunked twice": head(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    "gzip, then chunked": head(b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked"),
    "identity, then chunked": head(b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked"),
    "xchunked": head(b"Transfer-Encoding: xchunked") + b"0\r\n\r\n",
    "quoted": head(b'Transfer-Encoding: "chunked"') + b"0\r\n\r\n",
    "parameter": head(b"Transfer-Encoding: chunked;q=1") + b"0\r\n\r\n",
    "vertical tab": head(b"Transfer-Encoding: \x0bchunked") + b"0\r\n\r\n",
    "space before the colon": head(b"Transfer-Encoding : chunked") + b"0\r\n\r\n",
    "in HTTP/1.0": head(b"Transfer-Encoding: chunked", first=b"POST /x HTTP/1.0") + b"0\r\n\r\n",
}
LINES = {
    "obs-fold": head(b"X-A: 1", b" 2"),
    "obs-fold, tab": head(b"X-A: 1", b"\t2"),
    "obs-fold of the coding": head(b"Transfer-Encoding:", b" chunked") + b"0\r\n\r\n",
    "folded first line": b"POST /x HTTP/1.1\r\n Host: a\r\n\r\n",
    "bare LF": b"POST /x HTTP/1.1\nHost: a\n\n",
    "bare LF in a header": head(b"X-A: 1\nX-B: 2"),
    "bare LF at the end": b"POST /x HTTP/1.1\r\nHost: a\r\n\n",
    "bare CR in a header": head(b"X-A: 1\rX-B: 2"),
    "CR CR LF": b"POST /x HTTP/1.1\r\nHost: a\r\r\n\r\n",
    "no name": head(b": 1"),
    "no colon": head(b"X-A"),
    "space in a name": head(b"X A: 1"),
    "tab before the colon": head(b"X-A\t: 1"),
    "NUL in a name": head(b"X\0A: 1"),
    "a separator in a name": head(b"X(A): 1"),
    "latin-1 in a name": head(b"X\xe9: 1"),
} | {f"control byte {byte:#04x}": head(b"X-A: a%cb" % byte) for byte in CONTROL_BYTES}
HOSTS = {
    "no Host": head(host=None),
    "two Hosts": head(b"Host: b"),
    "the same Host twice": head(b"Host: a"),
    "two Hosts in HTTP/1.0": head(b"Host: b", first=b"GET /x HTTP/1.0"),
    "list of Hosts": head(host=b"a, b"),
    "path in Host": head(host=b"a/b"),
    "user in Host": head(host=b"u@a"),
    "space in Host": head(host=b"a b"),
    "latin-1 in Host": head(host=b"\xe9"),
}
FIRST_LINES = {
    "lower-case method": b"get /x HTTP/1.1\r\nHost: a\r\n\r\n",
    "unknown method": b"SMUGGLE /x HTTP/1.1\r\nHost: a\r\n\r\n",
    "no method": b" /x HTTP/1.1\r\nHost: a\r\n\r\n",
    "tab after the method": b"GET\t/x HTTP/1.1\r\nHost: a\r\n\r\n",
    "space in the target": b"GET /x y HTTP/1.1\r\nHost: a\r\n\r\n",
    "space after the version": b"GET /x HTTP/1.1 \r\nHost: a\r\n\r\n",
    "HTTP/1.2": b"GET /x HTTP/1.2\r\nHost: a\r\n\r\n",
    "HTTP/11": b"GET /x HTTP/11\r\nHost: a\r\n\r\n",
    "lower-case version": b"GET /x http/1.1\r\nHost: a\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": bytes.fromhex("16030100b7010000b3") + b"x" * 20,
    "SOCKS": b"\x05\x01\x00",
    "nothing of HTTP": b"SSH-2.0-OpenSSH_9.9\r\n",
}
VERSIONS = {
    "HTTP/0.9": b"GET /x\r\n\r\n",
    "HTTP/0.9, said": b"GET /x HTTP/0.9\r\nHost: a\r\n\r\n",
    "HTTP/2.0": b"GET /x HTTP/2.0\r\nHost: a\r\n\r\n",
}
TARGETS = {
    name: b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % target
    for name, target in {
        "absolute": b"http://evil.example/x",
        "absolute, https": b"https://evil.example/x",
        "absolute, our own": b"http://a/x",
        "authority": b"evil.example:443",
        "asterisk": b"*",
        "no slash": b"x",
        "two slashes": b"//evil.example/x",
        "dots": b"/v1/../metrics",
        "dots at the end": b"/v1/..",
        "one dot": b"/v1/./x",
        "one encoded dot": b"/v1/%2E/x",
        "encoded dots": b"/v1/%2e%2e/metrics",
        "encoded dots, mixed case": b"/v1/%2E%2e/metrics",
        "half encoded dots": b"/v1/.%2E/metrics",
        "dots and encoded slash": b"/v1/..%2fmetrics",
        "encoded slashes and dots": b"/v1%2F%2e%2e%2Fmetrics",
        "backslash": b"/v1\\..\\x",
        "encoded backslash": b"/v1%5cx",
        "encoded backslash, upper case": b"/v1%5Cx",
        "control byte": b"/v1\x01",
        "tab": b"/v1\tx",
        "NUL": b"/v1\0",
        "DEL": b"/v1\x7f",
        "control byte in the query": b"/v1?a\x01",
        "encoded NUL": b"/v1/%00",
        "encoded CRLF": b"/v1/x%0d%0aX-A:%201",
        "encoded DEL": b"/v1/%7F",
        "UTF-8": "/v1/é".encode(),
        "latin-1": b"/v1/\xe9",
        "fragment": b"/v1#x",
        "fragment after a query": b"/v1?a#x",
    }.items()
} | {
    "CONNECT": b"CONNECT evil.example:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    "CONNECT to a path": b"CONNECT /x HTTP/1.1\r\nHost: a\r\n\r\n",
    "OPTIONS *": b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
}
EXPECTATIONS = {
    "unknown": head(b"Expect: 200-ok", b"Content-Length: 3") + b"abc",
    "two": head(b"Expect: 100-continue", b"Expect: x", b"Content-Length: 3") + b"abc",
    "list": head(b"Expect: 100-continue, x"),
    "empty": head(b"Expect:"),
}
UPGRADES = {
    "with two Hosts": head(b"Host: b", b"Connection: upgrade", b"Upgrade: websocket"),
    "with length and chunked": head(
        *(b"Connection: upgrade", b"Upgrade: h2c"),
        *(b"Content-Length: 3", b"Transfer-Encoding: chunked"),
    )
    + b"0\r\n\r\n",
    "with another coding": head(
        b"Connection: upgrade", b"Upgrade: websocket", b"Transfer-Encoding: gzip, chunked"
    ),
    "to another place": head(
        b"Connection: upgrade", b"Upgrade: websocket", first=b"GET http://evil/x HTTP/1.1"
    ),
    "with dots": head(b"Connection: upgrade", b"Upgrade: h2c", first=b"GET /../x HTTP/1.1"),
}


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        pytest.param(LENGTHS, 400, id="Content-Length"),
        pytest.param(CODINGS, 400, id="Transfer-Encoding"),
        pytest.param(LINES, 400, id="header lines"),
        pytest.param(HOSTS, 400, id="Host"),
        pytest.param(FIRST_LINES, 400, id="request line"),
        pytest.param(VERSIONS, 505, id="version"),
        pytest.param(TARGETS, 400, id="target"),
        pytest.param(EXPECTATIONS, 417, id="Expect"),
        pytest.param(UPGRADES, 400, id="upgrade"),
    ],
)
async def test_head_is_refused(
    rows: dict[str, bytes], status: int, fake: FakeVllm, lastword: StartLastword
) -> None:
    """A head that could mean two things is an error, and upstream does not hear of it."""
    proxy = await lastword()
    for name, data in rows.items():
        for how, cut in CUTS.items():
            try:
                assert_refused(await talk(proxy.url, cut(data)), status)
            except Exception as error:
                error.add_note(f"{name}, {how}")
                raise
    assert fake.connections == 0


BODIES = {
    "no number": b"zz\r\nabc\r\n0\r\n\r\n",
    "garbage behind the size": b"3x\r\nabc\r\n0\r\n\r\n",
    "0x": b"0x3\r\nabc\r\n0\r\n\r\n",
    "negative": b"-3\r\nabc\r\n0\r\n\r\n",
    "plus": b"+3\r\nabc\r\n0\r\n\r\n",
    "space before the size": b" 3\r\nabc\r\n0\r\n\r\n",
    "space behind the size": b"3 \r\nabc\r\n0\r\n\r\n",
    "more than 64 bits": b"fffffffffffffffff\r\nabc",
    "bare LF": b"3\nabc\n0\n\n",
    "no line end behind the data": b"3\r\nabc0\r\n\r\n",
    "longer than its size": b"3\r\nabcd\r\n0\r\n\r\n",
    "control byte in an extension": b"3;a=\x01\r\nabc\r\n0\r\n\r\n",
    "bare LF in an extension": b"3;a\nabc\r\n0\r\n\r\n",
    "trailer of a length": b"3\r\nabc\r\n0\r\nContent-Length: 5\r\n\r\n",
    "trailer of a coding": b"3\r\nabc\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "NUL in a trailer": b"3\r\nabc\r\n0\r\nX-A: \0\r\n\r\n",
    "obs-fold in a trailer": b"3\r\nabc\r\n0\r\nX-A: 1\r\n 2\r\n\r\n",
}


async def test_body_that_breaks_is_refused(fake: FakeVllm, lastword: StartLastword) -> None:
    """A body whose framing breaks is 400; upstream sees no end of it, and is left alone."""
    proxy = await lastword()
    fake.handler = echo
    for target in (b"/v1/responses", b"/v1/files"):
        for name, body in BODIES.items():
            for how, cut in CUTS.items():
                data = chunked(body).replace(b"/x", target, 1)
                try:
                    assert_refused(await talk(proxy.url, cut(data)), 400)
                except Exception as error:
                    error.add_note(f"{name}, {how}")
                    raise
    await fake.until(lambda: all(exchange.closed for exchange in fake.exchanges))
    assert not [request for request in fake.requests if request.complete]


PASSING = {
    "no body": (head(), b""),
    "length": (head(b"Content-Length: 3") + b"abc", b"abc"),
    "length with spaces": (head(b"Content-Length:   3 \t") + b"abc", b"abc"),
    "length with zeros": (head(b"Content-Length: 003") + b"abc", b"abc"),
    "chunked": (chunked(b"3\r\nabc\r\n0\r\n\r\n"), b"abc"),
    "chunked, capitals": (head(b"transfer-encoding: CHUNKED") + b"1\r\na\r\n0\r\n\r\n", b"a"),
    "chunked, a space behind": (head(b"Transfer-Encoding: chunked ") + b"0\r\n\r\n", b""),
    "zeros before a size": (chunked(b"0000000000000000003\r\nabc\r\n000\r\n\r\n"), b"abc"),
    "extensions": (chunked(b'3;a=b;c="d"\r\nabc\r\n0;x\r\n\r\n'), b"abc"),
    "trailers": (
        chunked(b"3\r\nabc\r\n0\r\nHost: b\r\nExpect: x\r\nX-A: 1\r\n\r\n"),
        b"abc",
    ),
    "trailers of an upgrade": (
        chunked(b"3\r\nabc\r\n0\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"),
        b"abc",
    ),
    "empty lines before": (b"\r\n\r\n\r\n" + head(), b""),
    "empty Host": (head(host=b""), b""),
    "IPv6 Host": (head(host=b"[::1]:8080"), b""),
    "latin-1 in a value": (head(b"X-A: \xe9\xff\x80"), b""),
    "tab in a value": (head(b"X-A: a\tb"), b""),
    "upgrade without Connection": (head(b"Upgrade: h2c", b"Content-Length: 3") + b"abc", b"abc"),
    "upgrade of a chunked request": (
        head(b"Connection: Upgrade", b"Upgrade: h2c", b"Transfer-Encoding: chunked")
        + b"3\r\nabc\r\n0\r\nX-A: 1\r\n\r\n",
        b"abc",
    ),
}


async def test_sound_request_passes(fake: FakeVllm, lastword: StartLastword) -> None:
    """What is sound goes up with one framing, without trailers, and the connection goes on."""
    proxy = await lastword()
    fake.handler = echo
    for name, (data, body) in PASSING.items():
        for how, cut in CUTS.items():
            try:
                async with connect(proxy.url) as wire:
                    await send(wire, cut(data))
                    assert (await wire.answer()).json()["body"] == body.decode()
                    await send(wire, cut(GET))
                    assert (await wire.answer()).json()["method"] == "GET"
                request = fake.requests[-2]
                assert (request.target, bytes(request.body)) == (b"/x", body)
                assert request.trailers == b""
                assert len(request.values("host")) == 1
                framing = request.values("transfer-encoding") + request.values("content-length")
                assert len(framing) <= 1
                assert not request.values("upgrade")
            except Exception as error:
                error.add_note(f"{name}, {how}")
                raise
    assert len(fake.requests) == 2 * len(PASSING) * len(CUTS)


async def test_trailer_that_closes_is_no_silence(fake: FakeVllm, lastword: StartLastword) -> None:
    """The parser believes a trailer ``Connection: close``: then it must really close."""
    proxy = await lastword()
    fake.handler = echo
    for cut in CUTS.values():
        answer = await talk(proxy.url, cut(chunked(b"3\r\nabc\r\n0\r\nConnection: close\r\n\r\n")))
        assert answer.json()["body"] == "abc"


async def test_http_1_0_may_do_without_a_host(fake: FakeVllm, lastword: StartLastword) -> None:
    """A health check of HAProxy's sends none; upstream, asked by HTTP/1.1, gets its own name."""
    proxy = await lastword()
    fake.handler = echo
    for upgrade in (b"", b"Connection: upgrade\r\nUpgrade: h2c\r\n"):
        async with connect(proxy.url) as wire:
            await wire.send(
                b"GET /health HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n"
                + upgrade
                + b"\r\n"
            )
            await wire.send(b"a")
            assert (await wire.answer()).status == 200  # and no 100, which HTTP/1.0 does not know
            assert await wire.at_eof()
        assert fake.requests[-1].values("host") == [fake.url.removeprefix("http://").encode()]


@pytest.mark.parametrize(
    ("second", "status"),
    [
        pytest.param(head(b"Expect: x", b"Content-Length: 2") + b"{}", 417, id="Expect"),
        pytest.param(head(b"Host: b"), 400, id="two Hosts"),
        pytest.param(b"nonsense\r\n\r\n", 400, id="no HTTP"),
    ],
)
async def test_request_behind_an_ignored_upgrade(
    fake: FakeVllm, lastword: StartLastword, second: bytes, status: int
) -> None:
    """It is refused for what is wrong with it, in its turn, however it was read."""
    proxy = await lastword()
    fake.handler = echo
    first = head(b"Connection: upgrade", b"Upgrade: h2c", b"Content-Length: 3") + b"abc"
    async with connect(proxy.url) as wire:
        await wire.send(first + second)
        assert [(await wire.answer()).status, (await wire.answer()).status] == [200, status]
