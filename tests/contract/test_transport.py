"""The contract of the upstream transport: what goes over the wire, and what is told of it.

Real sockets, on asyncio's loop and on uvloop. A fixture makes the transport, so another one can
be held to the same contract.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING, Protocol, TypeVar

import httpx
import pytest

from proxy.core.http_chunk import data_size
from proxy.upstream.transport import UpstreamStream, UpstreamTransport
from tests.contract.raw_server import TLS_NAME, RawPeer, RawServer, reset, tls_contexts
from tests.loops import on_loops
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
    from pathlib import Path

    Headers = list[tuple[bytes, bytes]]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
MIB = 1024 * 1024

T = TypeVar("T")

pytest_generate_tests = on_loops("asyncio", "uvloop")


class MakeTransport(Protocol):
    """Makes a transport to the test's server; it is closed when the test ends."""

    def __call__(
        self,
        *,
        port: int = ...,
        keepalive_s: float = ...,
        connect_timeout_s: float = ...,
        max_idle: int = ...,
        max_response_head_bytes: int = ...,
    ) -> UpstreamTransport:
        """Make one; what is not given has the transport's own default."""


@pytest.fixture
async def server() -> AsyncIterator[RawServer]:
    """Give an upstream that does nothing by itself."""
    async with RawServer() as server:
        yield server


@pytest.fixture
async def make(server: RawServer) -> AsyncIterator[MakeTransport]:
    """Give the constructor of the transport under test."""
    made: list[UpstreamTransport] = []

    def make(**options: float) -> UpstreamTransport:
        arguments = {"host": "127.0.0.1", "port": server.port} | options
        made.append(UpstreamTransport(**arguments))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for transport in made:
        await transport.aclose()


@pytest.fixture
def transport(make: MakeTransport) -> UpstreamTransport:
    """Give a transport with its defaults."""
    return make()


@pytest.fixture(autouse=True)
async def nothing_left(server: RawServer) -> AsyncIterator[None]:
    """No task outlives its test, and nothing is reported to the loop behind our back."""
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        await asyncio.wait(left, timeout=PATIENCE_S)
    assert not [task for task in left if not task.done()]
    assert not reported


class Body(httpx.AsyncByteStream):
    """A request body that is pulled, and says how often it was."""

    def __init__(self, chunks: Iterable[bytes] = (), *, then: BaseException | None = None) -> None:
        self._chunks = chunks
        self._then = then
        self.pulls = 0
        self.closed = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            for chunk in self._chunks:
                self.pulls += 1
                yield chunk
            if self._then is not None:
                raise self._then
        finally:
            await turns(3)  # whoever does not wait for the end is found out
            self.closed.set()


class Unending(Body):
    """A request body that gives what it has and then waits for more that never comes."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            for chunk in self._chunks:
                yield chunk
            await asyncio.Event().wait()
        finally:
            await turns(3)
            self.closed.set()


def request(
    method: str = "GET",
    target: bytes = b"/",
    headers: Headers | None = None,
    body: bytes | httpx.AsyncByteStream = b"",
    *,
    read_timeout_s: float | None = None,
) -> httpx.Request:
    """Return a request that holds what is given and nothing else."""
    return httpx.Request(
        method,
        "http://upstream/",
        headers=headers if headers is not None else [(b"Host", b"upstream")],
        stream=httpx.ByteStream(body) if isinstance(body, bytes) else body,
        extensions={"target": target, "timeout": {"read": read_timeout_s}},
    )


def post(body: bytes | httpx.AsyncByteStream, *, length: int | None = None) -> httpx.Request:
    """Return a POST; a streamed body without `length` goes chunked."""
    known = len(body) if isinstance(body, bytes) else length
    framing = (
        (b"Transfer-Encoding", b"chunked")
        if known is None
        else (b"Content-Length", str(known).encode())
    )
    return request("POST", headers=[(b"Host", b"upstream"), framing], body=body)


async def until(happened: Callable[[], bool]) -> None:
    """Let the loop turn until something is seen to have happened."""
    async with asyncio.timeout(PATIENCE_S):
        while not happened():  # noqa: ASYNC110 - what happens inside has no event
            await asyncio.sleep(0.001)


async def turns(count: int = 50) -> None:
    """Let the loop turn, sockets polled each time, so that what could happen does."""
    for _ in range(count):
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def running(work: Coroutine[None, None, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run `work` beside the test, and cancel it with it."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def patient(task: asyncio.Task[T]) -> T:
    """Return what a task returns."""
    async with asyncio.timeout(PATIENCE_S):
        return await task


def stream_of(response: httpx.Response) -> UpstreamStream:
    """Return the body's stream as what it is."""
    assert isinstance(response.stream, UpstreamStream)
    return response.stream


async def read(response: httpx.Response) -> bytes:
    """Return the whole body, by iteration."""
    async with asyncio.timeout(PATIENCE_S):
        return b"".join([chunk async for chunk in stream_of(response)])


async def piped(response: httpx.Response) -> list[bytes]:
    """Return the whole body, by pushing: each sink call apart."""
    chunks: list[bytes] = []
    async with asyncio.timeout(PATIENCE_S):
        await stream_of(response).pipe_to(chunks.append)
    return chunks


async def ask(
    transport: UpstreamTransport,
    server: RawServer,
    answer: bytes,
    sent: httpx.Request | None = None,
) -> tuple[httpx.Response, RawPeer, bytes]:
    """Send a request on a new connection, answer it; return response, peer and the head it got."""
    async with running(transport.handle_async_request(sent or request())) as task:
        peer = await server.accept()
        head = await peer.head()
        peer.send(answer)
        return await patient(task), peer, head


async def ask_again(
    transport: UpstreamTransport, peer: RawPeer, answer: bytes, sent: httpx.Request | None = None
) -> tuple[httpx.Response, bytes]:
    """Send a request that `peer`'s connection must carry; return response and head."""
    async with running(transport.handle_async_request(sent or request())) as task:
        head = await peer.head()
        peer.send(answer)
        return await patient(task), head


# What goes up.


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(b"/a%2Fb?x=%20+%2F&&=", id="escapes"),
        pytest.param(b"*", id="asterisk"),
        pytest.param(b"/v1/../a/./b//c?", id="dots"),
        pytest.param(b"/%zz/\xc3\xa9?q='\"<>{}|\\^`#f", id="what URL classes change"),
    ],
)
async def test_target_goes_up_verbatim(
    transport: UpstreamTransport, server: RawServer, target: bytes
) -> None:
    """The request line holds the target's bytes as they were given."""
    _, _, head = await ask(transport, server, OK, request("OPTIONS", target))
    assert head == b"OPTIONS " + target + b" HTTP/1.1\r\nHost: upstream\r\n\r\n"


async def test_target_is_the_urls_without_an_extension(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """Without the extension the URL's raw path is the target."""
    plain = httpx.Request("GET", "http://upstream/a%2Fb?c=%20d", headers=[(b"Host", b"h")])
    _, _, head = await ask(transport, server, OK, plain)
    assert head == b"GET /a%2Fb?c=%20d HTTP/1.1\r\nHost: h\r\n\r\n"


async def test_headers_go_up_as_they_are_and_none_is_invented(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """Order, case, repetition and bytes are the caller's; not one header is added."""
    headers = [
        (b"hOST", b"h"),
        (b"X-A", b"1"),
        (b"x-b", b"caf\xe9 \xff\xc3\xa9"),
        (b"x-a", b"2, 3"),
        (b"X-Empty", b""),
        (b"X-A", b"1"),
        (b"Cookie", b"a=b"),
        (b"cookie", b"c=d"),
    ]
    _, _, head = await ask(transport, server, OK, request("QUERY", headers=headers))
    assert head == (
        b"QUERY / HTTP/1.1\r\nhOST: h\r\nX-A: 1\r\nx-b: caf\xe9 \xff\xc3\xa9\r\nx-a: 2, 3\r\n"
        b"X-Empty: \r\nX-A: 1\r\nCookie: a=b\r\ncookie: c=d\r\n\r\n"
    )


async def test_request_without_headers_has_none(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """Not even Host is invented."""
    _, _, head = await ask(transport, server, OK, request(headers=[]))
    assert head == b"GET / HTTP/1.1\r\n\r\n"


async def test_cookie_of_one_response_is_in_no_later_request(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """Set-Cookie passes down and nothing of it ever goes up."""
    answer = OK.replace(b"\r\n\r\n", b"\r\nSet-Cookie: user=1; Path=/\r\n\r\n")
    response, peer, _ = await ask(transport, server, answer)
    assert (b"Set-Cookie", b"user=1; Path=/") in response.headers.raw
    for _ in range(2):
        _, head = await ask_again(transport, peer, answer)
        assert head == b"GET / HTTP/1.1\r\nHost: upstream\r\n\r\n"


@pytest.mark.parametrize("size", [0, 5, 70_000], ids=str)
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_known_body_goes_up_framed_as_its_header_says(
    transport: UpstreamTransport, server: RawServer, size: int, *, chunked: bool
) -> None:
    """Bytes go raw after Content-Length, and as one chunk when chunked."""
    body = b"x" * size
    framing = (b"Transfer-Encoding", b"Chunked") if chunked else (b"Content-Length", b"%d" % size)
    sent = request("POST", headers=[framing], body=body)
    one_chunk = b"%x\r\n%b\r\n" % (size, body) if size else b""
    expected = one_chunk + b"0\r\n\r\n" if chunked else body
    async with running(transport.handle_async_request(sent)) as task:
        peer = await server.accept()
        assert await peer.head() == b"POST / HTTP/1.1\r\n%b: %b\r\n\r\n" % framing
        assert await peer.exactly(len(expected)) == expected
        peer.send(OK)
        assert await read(await patient(task)) == b"ok"
    assert await ask_again(transport, peer, OK)  # it left nothing behind on the connection


async def test_streamed_body_is_chunked_by_the_transport(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """Each chunk of the stream becomes one HTTP chunk; an empty one does not end the body."""
    body = Body([b"abc", b"", b"x" * 17])
    expected = b"3\r\nabc\r\n11\r\n" + b"x" * 17 + b"\r\n0\r\n\r\n"
    async with running(transport.handle_async_request(post(body))) as task:
        peer = await server.accept()
        await peer.head()
        assert await peer.exactly(len(expected)) == expected
        peer.send(OK)
        await read(await patient(task))
    assert body.closed.is_set()
    await ask_again(transport, peer, OK)


async def test_streamed_body_of_known_length_goes_raw(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """With Content-Length the stream's bytes go as they are; its own end is not waited for."""
    body = Unending([b"abc", b"", b"defg"])
    async with running(transport.handle_async_request(post(body, length=7))) as task:
        peer = await server.accept()
        await peer.head()
        assert await peer.exactly(7) == b"abcdefg"
        peer.send(OK)
        await read(await patient(task))
    await ask_again(transport, peer, OK)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(request(headers=[(b"X-A", b"1\r\nX-B: 2")]), id="CRLF in a value"),
        pytest.param(request(headers=[(b"X-A", b"1\n")]), id="LF in a value"),
        pytest.param(request(headers=[(b"X-A", b"\x00")]), id="NUL in a value"),
        pytest.param(request(headers=[(b"X-A", b"\x7f")]), id="DEL in a value"),
        pytest.param(request(headers=[(b"X A", b"1")]), id="space in a name"),
        pytest.param(request(headers=[(b"X-A:", b"1")]), id="colon in a name"),
        pytest.param(request(headers=[(b"X\r\nA", b"1")]), id="CRLF in a name"),
        pytest.param(request(headers=[(b"", b"1")]), id="empty name"),
        pytest.param(request(headers=[(b"X-\xe9", b"1")]), id="latin-1 in a name"),
        pytest.param(request(target=b"/ HTTP/1.1\r\n\r\n"), id="CRLF in the target"),
        pytest.param(request(target=b"/a b"), id="space in the target"),
        pytest.param(request(target=b"/\x00"), id="NUL in the target"),
        pytest.param(request("GET /"), id="space in the method"),
        pytest.param(request("GET\r\n"), id="CRLF in the method"),
        pytest.param(request("G\xc9T"), id="latin-1 in the method"),
        pytest.param(request(""), id="empty method"),
        pytest.param(request("POST", headers=[], body=b"x"), id="body without framing"),
        pytest.param(
            request("POST", headers=[(b"Content-Length", b"2")], body=b"x"), id="body too short"
        ),
        pytest.param(
            request("POST", headers=[(b"Content-Length", b"+1")], body=b"x"), id="odd length"
        ),
        pytest.param(
            request("POST", headers=[(b"Content-Length", b"1")] * 2, body=b"x"), id="two lengths"
        ),
        pytest.param(
            request(
                "POST",
                headers=[(b"Content-Length", b"1"), (b"Transfer-Encoding", b"chunked")],
                body=b"x",
            ),
            id="length and chunked",
        ),
        pytest.param(
            request("POST", headers=[(b"Transfer-Encoding", b"gzip, chunked")], body=b"x"),
            id="other coding",
        ),
    ],
)
async def test_request_that_would_break_framing_is_refused_before_a_byte(
    transport: UpstreamTransport, server: RawServer, bad: httpx.Request
) -> None:
    """LocalProtocolError, and upstream sees nothing, not even a connection."""
    with pytest.raises(httpx.LocalProtocolError):
        await transport.handle_async_request(bad)
    await turns(3)
    assert server.connections == 0


@pytest.mark.parametrize(
    "chunks", [[b"abc"], [b"abcdef"], [b"abc", b"def"]], ids=["short", "long", "long in parts"]
)
async def test_stream_of_the_wrong_length_closes_the_connection(
    transport: UpstreamTransport, server: RawServer, chunks: list[bytes]
) -> None:
    """A stream that is not as long as announced never reaches upstream as a whole request."""
    async with running(transport.handle_async_request(post(Body(chunks), length=5))) as task:
        peer = await server.accept()
        await peer.head()
        with pytest.raises(httpx.LocalProtocolError, match=r"\d bytes where .* announces 5"):
            await patient(task)
        assert len(await peer.left()) < 5


# What comes down.


async def test_response_head_comes_down_as_it_was_sent(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """Status, reason, version, and header pairs: order, case, repetition and bytes are kept."""
    answer = (
        b"HTTP/1.1 299 Tr\xe8s bien\r\nX-A: 1\r\nx-a: \t caf\xe9\xff \t\r\nX-Empty:\r\nDate: d\r\n"
        b"Set-Cookie: a\r\nset-cookie: b\r\nX-A: 1\r\ncontent-LENGTH: 0\r\n\r\n"
    )
    response, _, _ = await ask(transport, server, answer)
    assert response.status_code == 299
    assert response.extensions == {"http_version": b"HTTP/1.1", "reason_phrase": b"Tr\xe8s bien"}
    assert response.headers.raw == [
        (b"X-A", b"1"),
        (b"x-a", b"caf\xe9\xff"),
        (b"X-Empty", b""),
        (b"Date", b"d"),
        (b"Set-Cookie", b"a"),
        (b"set-cookie", b"b"),
        (b"X-A", b"1"),
        (b"content-LENGTH", b"0"),
    ]


async def test_response_is_the_same_however_it_is_cut(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """One byte per read gives the same head and body as one read."""
    answer = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Made it\r\nX-A: 1\r\nX-E:\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nX-T: 1\r\n\r\n"
    )
    async with running(transport.handle_async_request(request())) as task:
        peer = await server.accept()
        await peer.head()
        for index in range(len(answer)):
            peer.send(answer[index : index + 1])
            await asyncio.sleep(0)
        response = await patient(task)
    assert (response.status_code, response.extensions["reason_phrase"]) == (201, b"Made it")
    assert response.headers.raw[:2] == [(b"X-A", b"1"), (b"X-E", b"")]
    assert await read(response) == b"abcde"
    await ask_again(transport, peer, OK)


async def test_trailers_are_dropped(transport: UpstreamTransport, server: RawServer) -> None:
    """What comes after the last chunk becomes no header, also when all came in one read."""
    answer = CHUNKED + b"1\r\na\r\n0\r\nAuthorization: x\r\n\r\n"
    response, _, _ = await ask(transport, server, answer)
    assert response.headers.raw == [(b"Transfer-Encoding", b"chunked")]


@pytest.mark.parametrize("take", [read, piped], ids=["iterated", "pushed"])
@pytest.mark.parametrize(
    ("answer", "body", "kept"),
    [
        pytest.param(OK, b"ok", True, id="length"),
        pytest.param(CHUNKED + b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n", b"abc", True, id="chunked"),
        pytest.param(CHUNKED + b"1\r\na\r\n0\r\nX-T: 1\r\n\r\n", b"a", True, id="trailers"),
        pytest.param(b"HTTP/1.1 204 No\r\nX: y\r\n\r\n", b"", True, id="204"),
        pytest.param(b"HTTP/1.1 304 No\r\nContent-Length: 5\r\n\r\n", b"", True, id="304"),
        pytest.param(b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", b"", True, id="no reason"),
        pytest.param(
            b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 1\r\n\r\na",
            b"a",
            True,
            id="1.0 kept",
        ),
        pytest.param(
            b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na", b"a", False, id="1.0 not kept"
        ),
        pytest.param(
            OK.replace(b"\r\n\r\n", b"\r\nConnection: x, Close\r\n\r\n"), b"ok", False, id="close"
        ),
        pytest.param(OK + b"HTTP/1.1 200 OK\r\n", b"ok", False, id="a second answer"),
        pytest.param(OK + b"garbage", b"ok", False, id="garbage after"),
        pytest.param(
            OK.replace(b"\r\n\r\n", b"\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"),
            b"ok",
            True,
            id="upgrade offered",
        ),
    ],
)
async def test_body_ends_where_its_framing_says(
    transport: UpstreamTransport,
    server: RawServer,
    take: Callable[[httpx.Response], Coroutine[None, None, bytes | list[bytes]]],
    answer: bytes,
    body: bytes,
    *,
    kept: bool,
) -> None:
    """Each framing gives its body, and the connection is kept only where nothing forbids it."""
    response, peer, _ = await ask(transport, server, answer)
    taken = await take(response)
    assert (taken if isinstance(taken, bytes) else b"".join(taken)) == body
    if kept:
        await ask_again(transport, peer, OK)
    else:
        assert await peer.left() == b""
        await ask(transport, server, OK)
    assert server.connections == (1 if kept else 2)


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 1000\r\n", b"Transfer-Encoding: chunked\r\n", b""], ids=str
)
async def test_head_response_has_no_body(
    transport: UpstreamTransport, server: RawServer, framing: bytes
) -> None:
    """The header of a HEAD's response announces what is not sent; the connection is kept."""
    answer = b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n"
    response, peer, _ = await ask(transport, server, answer, request("HEAD"))
    assert await read(response) == b""
    await ask_again(transport, peer, OK)


async def test_head_response_with_a_body_drops_the_connection(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """A body after a HEAD's response would be taken for the next answer."""
    response, peer, _ = await ask(transport, server, OK, request("HEAD"))
    assert await read(response) == b""
    assert await peer.left() == b""


@pytest.mark.parametrize("take", [read, piped], ids=["iterated", "pushed"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"], ids=str)
async def test_body_without_framing_ends_at_eof(
    transport: UpstreamTransport,
    server: RawServer,
    take: Callable[[httpx.Response], Coroutine[None, None, bytes | list[bytes]]],
    version: bytes,
) -> None:
    """Without a length and not chunked, the body is what comes until upstream closes."""
    response, peer, _ = await ask(transport, server, b"HTTP/" + version + b" 200 OK\r\n\r\nab")
    async with running(take(response)) as task:
        await turns(3)
        peer.send(b"cd")
        peer.close()
        taken = await patient(task)
    assert (taken if isinstance(taken, bytes) else b"".join(taken)) == b"abcd"


async def test_interim_responses_are_skipped(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """100, 103 and unknown 1xx are no answer, in one read or in several."""
    async with running(transport.handle_async_request(request())) as task:
        peer = await server.accept()
        await peer.head()
        peer.send(b"HTTP/1.1 100 Continue\r\nX-I: 1\r\n\r\nHTTP/1.1 103 Early\r\nLink: a\r\n\r\n")
        await turns(3)
        assert not task.done()
        peer.send(b"HTTP/1.1 199 Odd\r\n\r\n" + OK)
        response = await patient(task)
    assert (response.status_code, response.extensions["reason_phrase"]) == (200, b"OK")
    assert response.headers.raw == [(b"Content-Length", b"2")]
    assert await read(response) == b"ok"
    await ask_again(transport, peer, OK)


# What goes wrong, told apart.


async def test_refused_connection_is_a_connect_error(make: MakeTransport) -> None:
    """Nothing listens: ConnectError that says refused."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(httpx.ConnectError, match="refused the connection") as caught:
        await make(port=port).handle_async_request(request())
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


async def test_unknown_host_is_a_connect_error() -> None:
    """A name without an address: ConnectError that says so."""
    transport = UpstreamTransport(host="no-such-host.invalid", port=80)
    with pytest.raises(httpx.ConnectError, match="host name"):
        await transport.handle_async_request(request())
    await transport.aclose()


async def test_connect_timeout(make: MakeTransport) -> None:
    """A listener whose backlog is full takes no connection: ConnectTimeout."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        with contextlib.ExitStack() as fillers:
            for _ in range(2):  # the kernel keeps one more than the backlog says
                filler = fillers.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
            with pytest.raises(httpx.ConnectTimeout, match=r"within 0\.05 s"):
                await make(port=port, connect_timeout_s=0.05).handle_async_request(request())


async def test_tls_failure_is_a_connect_error(server: RawServer) -> None:
    """An upstream that does not speak TLS: ConnectError, not a hang."""
    transport = UpstreamTransport(
        host="127.0.0.1", port=server.port, ssl_context=httpx.create_ssl_context()
    )
    async with running(transport.handle_async_request(request())) as task:
        peer = await server.accept()
        peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(httpx.ConnectError, match="TLS"):
            await patient(task)
    await transport.aclose()


def closing(data: bytes) -> Callable[[RawPeer], None]:
    """Return what sends `data` and ends the connection."""

    def end(peer: RawPeer) -> None:
        if data:
            peer.send(data)
        peer.close()

    return end


@pytest.mark.parametrize(
    ("end", "error", "message"),
    [
        pytest.param(
            closing(b""), httpx.RemoteProtocolError, "without an answer", id="closed at once"
        ),
        pytest.param(
            closing(b"HTTP/1.1 20"),
            httpx.RemoteProtocolError,
            "inside the response head",
            id="closed in the head",
        ),
        pytest.param(RawPeer.reset, httpx.ReadError, "reset", id="reset"),
        pytest.param(
            lambda peer: peer.send(b"SSH-2.0-OpenSSH\r\n"),
            httpx.RemoteProtocolError,
            "not valid HTTP",
            id="garbage",
        ),
        pytest.param(
            lambda peer: peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n"),
            httpx.RemoteProtocolError,
            "Content-Length",
            id="two lengths",
        ),
        pytest.param(
            lambda peer: peer.send(CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n")),
            httpx.RemoteProtocolError,
            "Content-Length",
            id="chunked, then length",
        ),
        pytest.param(
            lambda peer: peer.send(
                OK.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
            ),
            httpx.RemoteProtocolError,
            "Transfer-Encoding",
            id="length, then chunked",
        ),
        pytest.param(
            lambda peer: peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"),
            httpx.RemoteProtocolError,
            "transfer coding",
            id="other coding",
        ),
        pytest.param(
            lambda peer: peer.send(b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n"),
            httpx.RemoteProtocolError,
            r"not HTTP/1\.1",
            id="version",
        ),
        pytest.param(
            lambda peer: peer.send(b"HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n"),
            httpx.RemoteProtocolError,
            r"not HTTP/1\.1",
            id="status",
        ),
        pytest.param(
            lambda peer: peer.send(
                b"HTTP/1.1 101 Go\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
            ),
            httpx.RemoteProtocolError,
            "101",
            id="101",
        ),
    ],
)
async def test_failures_before_the_head_are_told_apart(
    transport: UpstreamTransport,
    server: RawServer,
    end: Callable[[RawPeer], None],
    error: type[Exception],
    message: str,
) -> None:
    """Each way to give no answer has its exception, its words, and ends the connection."""
    async with running(transport.handle_async_request(request())) as task:
        peer = await server.accept()
        await peer.head()
        end(peer)
        with pytest.raises(error, match=message) as caught:
            await patient(task)
        assert type(caught.value) is error
        assert await peer.left() == b""
    assert server.connections == 1


MALFORMED = {
    "obs-fold": b"HTTP/1.1 200 OK\r\nX-A: 1\r\n 2\r\nContent-Length: 0\r\n\r\n",
    "bare LF": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "bare LF in a header": b"HTTP/1.1 200 OK\r\nX-A: 1\nX-B: 2\r\nContent-Length: 0\r\n\r\n",
    "bare CR in a header": b"HTTP/1.1 200 OK\r\nX-A: 1\rX-B: 2\r\nContent-Length: 0\r\n\r\n",
    "NUL in a header": b"HTTP/1.1 200 OK\r\nX-A: \0\r\nContent-Length: 0\r\n\r\n",
    "DEL in a header": b"HTTP/1.1 200 OK\r\nX-A: \x7f\r\nContent-Length: 0\r\n\r\n",
    "space in a name": b"HTTP/1.1 200 OK\r\nX A: 1\r\nContent-Length: 0\r\n\r\n",
    "space before the colon": b"HTTP/1.1 200 OK\r\nContent-Length : 0\r\n\r\n",
    "no name": b"HTTP/1.1 200 OK\r\n: 1\r\nContent-Length: 0\r\n\r\n",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "signed length": b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\na",
    "the same length twice": OK.replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n"),
    "more than 64 bits": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
    "chunked twice": CHUNKED.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"),
    "identity": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\n",
    "parameter": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked;q=1\r\n\r\n",
    "status of four digits": b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\nContent-Length: 0\r\n\r\n",
    "a request": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
}


async def test_malformed_head_is_no_answer(transport: UpstreamTransport, server: RawServer) -> None:
    """A head that could mean two things means none; its connection is not used again."""
    for name, head in MALFORMED.items():
        async with running(transport.handle_async_request(request())) as task:
            peer = await server.accept()
            await peer.head()
            peer.send(head)
            try:
                with pytest.raises(httpx.RemoteProtocolError):
                    await patient(task)
                assert await peer.left() == b""
            except BaseException as error:
                error.add_note(name)
                raise
    assert server.connections == len(MALFORMED)


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 2000, id="one endless line"),
        pytest.param(b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 400, id="endless lines"),
        pytest.param(b"HTTP/1.1 200 " + b"a" * 2000, id="endless reason"),
        pytest.param(b"HTTP/1.1 103 Early\r\nLink: a\r\n\r\n" * 60, id="endless 1xx"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n" + b"X: a\r\n" * 400 + b"\r\na",
            id="whole, with its body",
        ),
    ],
)
async def test_response_head_is_bounded(
    make: MakeTransport, server: RawServer, head: bytes
) -> None:
    """More head than the limit is an error that names it."""
    transport = make(max_response_head_bytes=1000)
    async with running(transport.handle_async_request(request())) as task:
        peer = await server.accept()
        await peer.head()
        peer.send(head)
        with pytest.raises(httpx.RemoteProtocolError, match="larger than 1000 bytes"):
            await patient(task)
        assert await peer.left() == b""


@pytest.mark.parametrize(
    "endless",
    [
        pytest.param(b"5;" + b"a" * 2000, id="chunk extension"),
        pytest.param(b"0\r\nX: " + b"a" * 2000, id="trailer line"),
        pytest.param(b"0\r\n" + b"X: a\r\n" * 400, id="trailers"),
    ],
)
async def test_chunk_framing_is_bounded(
    make: MakeTransport, server: RawServer, endless: bytes
) -> None:
    """Framing without body does not fill memory."""
    transport = make(max_response_head_bytes=1000)
    response, peer, _ = await ask(transport, server, CHUNKED + b"2\r\nab\r\n")
    async with running(read(response)) as task:
        await turns(3)
        peer.send(endless)
        with pytest.raises(httpx.RemoteProtocolError, match="larger than 1000 bytes"):
            await patient(task)


async def test_chunk_framing_is_not_added_up_over_a_stream(
    make: MakeTransport, server: RawServer
) -> None:
    """A long stream whose framing comes apart from its data never reaches that limit."""
    transport = make(max_response_head_bytes=200)
    response, peer, _ = await ask(transport, server, CHUNKED)
    calls: list[bytes] = []
    async with running(stream_of(response).pipe_to(calls.append)) as task:
        for count in range(1, 6):
            peer.send(b"1;" + b"x" * 60 + b"\r\n")
            await turns(3)
            peer.send(b"a\r\n")
            await until(lambda count=count: len(calls) == count)  # type: ignore[misc]
        peer.send(b"0\r\n\r\n")
        await patient(task)
    assert calls == [b"a"] * 5


@pytest.mark.parametrize("pushed", [False, True], ids=["iterated", "pushed"])
@pytest.mark.parametrize(
    ("answer", "end", "error", "message"),
    [
        pytest.param(
            OK.replace(b": 2", b": 9"),
            RawPeer.close,
            httpx.RemoteProtocolError,
            "closed after 2 of 9 bytes",
            id="short",
        ),
        pytest.param(
            CHUNKED + b"2\r\nok\r\n",
            RawPeer.close,
            httpx.RemoteProtocolError,
            "before the last chunk",
            id="cut between chunks",
        ),
        pytest.param(
            CHUNKED + b"5\r\nok",
            RawPeer.close,
            httpx.RemoteProtocolError,
            "before the last chunk",
            id="cut inside a chunk",
        ),
        pytest.param(CHUNKED + b"2\r\nok\r\n", RawPeer.reset, httpx.ReadError, "reset", id="reset"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\n\r\nok", RawPeer.reset, httpx.ReadError, "reset", id="reset at EOF"
        ),
        pytest.param(
            CHUNKED + b"2\r\nok\r\n",
            lambda peer: peer.send(b"zz\r\n"),
            httpx.RemoteProtocolError,
            "not valid HTTP",
            id="garbage",
        ),
        pytest.param(
            CHUNKED + b"2\r\nok\r\nzz\r\n",
            lambda _: None,
            httpx.RemoteProtocolError,
            "not valid HTTP",
            id="garbage in the same read",
        ),
    ],
)
async def test_failures_in_the_body_are_told_apart(
    transport: UpstreamTransport,
    server: RawServer,
    *,
    pushed: bool,
    answer: bytes,
    end: Callable[[RawPeer], None],
    error: type[Exception],
    message: str,
) -> None:
    """What came before is delivered, then the error says how the body ended; never a clean end."""
    response, peer, _ = await ask(transport, server, answer)
    got: list[bytes] = []

    async def iterate() -> None:
        async for chunk in stream_of(response):
            got.append(chunk)  # noqa: PERF401 - what came is kept when it then fails

    async with running(stream_of(response).pipe_to(got.append) if pushed else iterate()) as task:
        await until(lambda: got == [b"ok"])
        end(peer)
        with pytest.raises(error, match=message) as caught:
            await patient(task)
    assert type(caught.value) is error
    assert got == [b"ok"]
    assert await peer.left() == b""


async def test_head_timeout(transport: UpstreamTransport, server: RawServer) -> None:
    """An upstream that accepts and never answers: ReadTimeout, and its connection is closed."""
    async with running(transport.handle_async_request(request(read_timeout_s=0.05))) as task:
        peer = await server.accept()
        with pytest.raises(httpx.ReadTimeout, match=r"within 0\.05 s"):
            await patient(task)
        await peer.head()
        assert await peer.left() == b""


async def test_head_timeout_counts_neither_the_body_nor_the_caller(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """While the caller's own body is awaited, and after the head, upstream has all its time."""
    more = asyncio.Event()

    class Slow(Body):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"a"
            await more.wait()
            yield b"b"

    sent = post(Slow(), length=2)
    sent.extensions["timeout"] = {"read": 0.05}
    async with running(transport.handle_async_request(sent)) as task:
        peer = await server.accept()
        await peer.head()
        await asyncio.sleep(0.12)  # not for order: longer than the time-out is the point
        more.set()
        await peer.exactly(2)
        peer.send(CHUNKED + b"1\r\na\r\n")
        response = await patient(task)
    await asyncio.sleep(0.12)
    peer.send(b"1\r\nb\r\n0\r\n\r\n")
    assert await read(response) == b"ab"


async def test_connection_lost_before_it_was_used_is_no_hang(
    transport: UpstreamTransport, server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream closes what it has just accepted: an error, also if that was seen too early."""
    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def slow(*args: object, **options: object) -> object:
        connected = await connect(*args, **options)  # type: ignore[call-overload]
        (await server.accept()).close()
        await until(connected[1].lost.done)
        return connected

    monkeypatch.setattr(loop, "create_connection", slow)
    with pytest.raises(httpx.RemoteProtocolError, match="without an answer"):
        async with asyncio.timeout(PATIENCE_S):
            await transport.handle_async_request(request())
    assert not transport._connections


# TLS.


async def test_tls_carries_the_same(tmp_path: Path) -> None:
    """Over TLS: reuse, an upload with backpressure, push, and a close that upstream sees."""
    server_tls, client_tls = tls_contexts(tmp_path)
    async with RawServer(server_tls) as server:
        transport = UpstreamTransport(
            host="127.0.0.1", port=server.port, ssl_context=client_tls, server_hostname=TLS_NAME
        )
        response, peer, _ = await ask(transport, server, OK)
        assert await read(response) == b"ok"
        body = Body(b"x" * MIB for _ in range(32))
        async with running(transport.handle_async_request(post(body, length=32 * MIB))) as task:
            await peer.head()
            (connection,) = transport._connections
            await until(lambda: connection._write_paused)
            await turns()
            assert body.pulls < 32
            for _ in range(32):
                await peer.exactly(MIB)
            peer.send(CHUNKED + b"1\r\na\r\n")
            response = await patient(task)
        calls: list[bytes] = []
        async with running(stream_of(response).pipe_to(calls.append)) as pushing:
            await until(lambda: calls == [b"a"])
            pushing.cancel()
            assert await peer.left() == b""
        await transport.aclose()
        assert server.connections == 1


async def test_tls_name_that_does_not_match_is_a_connect_error(tmp_path: Path) -> None:
    """The certificate is checked against `server_hostname`, by default the host."""
    server_tls, client_tls = tls_contexts(tmp_path)
    async with RawServer(server_tls) as server:
        transport = UpstreamTransport(host="127.0.0.1", port=server.port, ssl_context=client_tls)
        with pytest.raises(httpx.ConnectError, match="TLS failed"):
            await transport.handle_async_request(request())
        await transport.aclose()


# The pool.


async def test_connection_is_reused(transport: UpstreamTransport, server: RawServer) -> None:
    """A response read to its end leaves its connection for the next request; NODELAY is on."""
    response, peer, _ = await ask(transport, server, OK)
    assert await read(response) == b"ok"
    for _ in range(3):
        response, _ = await ask_again(transport, peer, OK)
        assert await read(response) == b"ok"
    assert server.connections == 1
    (connection,) = transport._connections
    assert connection._transport is not None
    raw = connection._transport.get_extra_info("socket")
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_newest_idle_connection_is_reused_first_and_idle_ones_are_bounded(
    make: MakeTransport, server: RawServer
) -> None:
    """LIFO; what is over `max_idle` is closed, the oldest first."""
    transport = make(max_idle=2)
    peers: list[RawPeer] = []
    async with contextlib.AsyncExitStack() as stack:
        tasks = []
        for _ in range(3):
            work = transport.handle_async_request(request())
            tasks.append(await stack.enter_async_context(running(work)))
            peers.append(await server.accept())
            await peers[-1].head()
        for peer, task in zip(peers, tasks, strict=True):
            peer.send(OK)
            await read(await patient(task))
    assert await peers[0].left() == b""
    await ask_again(transport, peers[2], OK)
    assert server.connections == 3


async def test_idle_connection_expires(make: MakeTransport, server: RawServer) -> None:
    """After `keepalive_s` an idle connection is closed by the transport itself."""
    transport = make(keepalive_s=0.05)
    _, peer, _ = await ask(transport, server, OK)
    assert await peer.left() == b""
    await until(lambda: not transport._connections)
    await ask(transport, server, OK)
    assert server.connections == 2


async def test_expired_connection_is_not_taken(
    make: MakeTransport, server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The age is looked at when a connection is taken: a late timer harms nobody."""
    transport = make(keepalive_s=1000)
    _, peer, _ = await ask(transport, server, OK)
    for connection in transport._idle:
        transport._idle[connection] -= 1000
    await ask(transport, server, OK)
    assert await peer.left() == b""


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(RawPeer.close, id="closed"),
        pytest.param(RawPeer.reset, id="reset"),
        pytest.param(lambda peer: peer.send(b"HTTP/1.1 408 Late\r\n\r\n"), id="unasked answer"),
        pytest.param(lambda peer: peer.send(b"x"), id="garbage"),
    ],
)
async def test_idle_connection_that_stirs_is_dropped(
    transport: UpstreamTransport, server: RawServer, end: Callable[[RawPeer], None]
) -> None:
    """EOF, a reset or any byte while idle: the next request has a new connection."""
    _, peer, _ = await ask(transport, server, OK)
    end(peer)
    assert await peer.left() == b""
    await until(lambda: not transport._connections)
    response, _, _ = await ask(transport, server, OK, post(b"x"))
    assert await read(response) == b"ok"
    assert server.connections == 2


async def test_two_hundred_streams_at_once(transport: UpstreamTransport, server: RawServer) -> None:
    """Each stream has its own connection and gets its own events, in order."""
    count, events = 200, 20

    async def serve() -> None:
        peer = await server.accept()
        name = (await peer.head()).split()[1]
        peer.send(CHUNKED)
        for number in range(events):
            line = b"%b %d\n" % (name, number)
            peer.send(b"%x\r\n%b\r\n" % (len(line), line))
            await asyncio.sleep(0)
        peer.send(b"0\r\n\r\n")

    async def client(number: int) -> bytes:
        response = await transport.handle_async_request(request(target=b"/%d" % number))
        return await read(response) if number % 2 else b"".join(await piped(response))

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(serve())
        clients = [group.create_task(client(number)) for number in range(count)]
    for number, task in enumerate(clients):
        assert task.result() == b"".join(b"/%d %d\n" % (number, event) for event in range(events))
    assert server.connections == count
    assert len(transport._idle) == count


# The repeat rule.


async def idle_connection(transport: UpstreamTransport, server: RawServer) -> RawPeer:
    """Return the server's side of an idle connection, ready to be reused."""
    response, peer, _ = await ask(transport, server, OK)
    await read(response)
    return peer


@pytest.mark.parametrize("end", [RawPeer.close, RawPeer.reset], ids=["closed", "reset"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"], ids=str)
async def test_idempotent_request_on_a_stale_connection_is_repeated_once(
    transport: UpstreamTransport,
    server: RawServer,
    method: str,
    end: Callable[[RawPeer], None],
) -> None:
    """Upstream closed as the request was sent: it goes again, the same bytes, and only once."""
    stale = await idle_connection(transport, server)
    async with running(transport.handle_async_request(request(method))) as task:
        head = await stale.head()
        end(stale)
        fresh = await server.accept()
        assert await fresh.head() == head
        end(fresh)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await patient(task)
    assert server.connections == 2


async def test_repeated_request_gets_its_answer(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """The caller of a repeated request sees one ordinary response."""
    stale = await idle_connection(transport, server)
    async with running(transport.handle_async_request(request())) as task:
        await stale.head()
        stale.close()
        fresh = await server.accept()
        await fresh.head()
        fresh.send(OK)
        assert await read(await patient(task)) == b"ok"
    await ask_again(transport, fresh, OK)


@pytest.mark.parametrize("end", [RawPeer.close, RawPeer.reset], ids=["closed", "reset"])
async def test_post_that_was_sent_is_not_repeated(
    transport: UpstreamTransport, server: RawServer, end: Callable[[RawPeer], None]
) -> None:
    """Upstream may have acted on it."""
    stale = await idle_connection(transport, server)
    async with running(transport.handle_async_request(post(b"hello"))) as task:
        await stale.head()
        await stale.exactly(5)
        end(stale)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await patient(task)
    assert server.connections == 1


@pytest.mark.parametrize("end", [RawPeer.close, RawPeer.reset], ids=["closed", "reset"])
async def test_post_that_was_not_sent_whole_is_repeated(
    transport: UpstreamTransport, server: RawServer, end: Callable[[RawPeer], None]
) -> None:
    """Upstream cannot have acted on half a body, and bytes can be sent again."""
    stale = await idle_connection(transport, server)
    body = bytes(range(256)) * 64 * 1024
    async with running(transport.handle_async_request(post(body))) as task:
        await stale.head()
        end(stale)
        fresh = await server.accept()
        await fresh.head()
        assert await fresh.exactly(len(body)) == body
        fresh.send(OK)
        assert await read(await patient(task)) == b"ok"
    assert server.connections == 2


async def test_small_post_that_the_kernel_did_not_take_is_repeated(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """Also the last few bytes in our own buffer count as not sent."""
    stale = await idle_connection(transport, server)
    (connection,) = transport._connections
    assert connection._transport is not None
    raw = connection._transport.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # it grows no more
    refused = 0
    while refused < 20:  # fill the kernel's buffers behind its back, and the server's
        try:
            os.write(raw.fileno(), bytes(65536))
            refused = 0
        except BlockingIOError:
            refused += 1
            await turns(3)
    async with running(transport.handle_async_request(post(b"hello"))) as task:
        await until(lambda: not connection.usable)
        await turns(3)
        assert connection._transport.get_write_buffer_size() > 0
        stale.reset()
        fresh = await server.accept()
        await fresh.head()
        fresh.send(OK)
        assert await read(await patient(task)) == b"ok"
    assert server.connections == 2


async def test_post_whose_first_write_fails_is_repeated(make: MakeTransport) -> None:
    """A connection that was reset an instant ago, unnoticed, takes no byte: nothing was sent."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        transport = make(port=listener.getsockname()[1])

        async def serve() -> socket.socket:
            peer, _ = await loop.sock_accept(listener)
            await loop.sock_recv(peer, 65536)
            await loop.sock_sendall(peer, OK)
            return peer

        async with running(serve()) as first:
            await read(await transport.handle_async_request(request()))
            peer = await patient(first)
        async with running(serve()) as second:
            await turns(3)
            reset(peer)  # no turn of the loop from here to the write
            async with asyncio.timeout(PATIENCE_S):
                response = await transport.handle_async_request(post(b"hello"))
            assert await read(response) == b"ok"
            (await patient(second)).close()


async def test_streamed_body_that_was_pulled_is_not_repeated(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """What was taken from a stream cannot be sent again, whatever the method."""
    stale = await idle_connection(transport, server)
    sent = post(Unending([b"abc"]))
    sent.method = "PUT"
    async with running(transport.handle_async_request(sent)) as task:
        await stale.head()
        stale.close()
        with pytest.raises(httpx.TransportError):
            await patient(task)
    assert server.connections == 1


@pytest.mark.parametrize("end", [RawPeer.close, RawPeer.reset], ids=["closed", "reset"])
async def test_nothing_is_repeated_on_a_new_connection(
    transport: UpstreamTransport, server: RawServer, end: Callable[[RawPeer], None]
) -> None:
    """A new connection is not stale: its end is upstream's answer."""
    async with running(transport.handle_async_request(request())) as task:
        peer = await server.accept()
        await peer.head()
        end(peer)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await patient(task)
    await turns(3)
    assert server.connections == 1


@pytest.mark.parametrize(
    "answer", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n", b"garbage"], ids=["a byte", "1xx", "garbage"]
)
async def test_nothing_is_repeated_after_a_byte_of_an_answer(
    transport: UpstreamTransport, server: RawServer, answer: bytes
) -> None:
    """Upstream had begun to answer, so it had the request."""
    stale = await idle_connection(transport, server)
    async with running(transport.handle_async_request(request())) as task:
        await stale.head()
        stale.send(answer)
        stale.close()
        with pytest.raises(httpx.RemoteProtocolError):
            await patient(task)
    await turns(3)
    assert server.connections == 1


async def test_timed_out_request_is_not_repeated(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """A slow upstream has the request already."""
    stale = await idle_connection(transport, server)
    async with running(transport.handle_async_request(request(read_timeout_s=0.05))) as task:
        await stale.head()
        with pytest.raises(httpx.ReadTimeout):
            await patient(task)
    assert server.connections == 1


# Uploads.


async def test_upload_is_held_back_by_upstream(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """While upstream does not read, the body's iterator is not pulled: one chunk is in memory."""
    chunk = b"x" * MIB
    body = Body(chunk for _ in range(64))
    async with running(transport.handle_async_request(post(body, length=64 * MIB))) as task:
        peer = await server.accept()
        (connection,) = transport._connections
        await until(lambda: connection._write_paused)
        await turns()
        pulled = body.pulls
        assert pulled < 32
        assert connection._transport is not None
        assert connection._transport.get_write_buffer_size() <= MIB
        await turns()
        assert body.pulls == pulled
        await peer.head()
        for _ in range(64):
            assert await peer.exactly(MIB) == chunk
        peer.send(OK)
        assert await read(await patient(task)) == b"ok"
    assert body.pulls == 64


async def test_upload_from_memory_leaves_the_loop_to_others(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """A body that never waits, to an upstream that takes all, is no busy loop."""
    others = 0

    async def tick() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    sent = post(Body(b"x" for _ in range(1000)), length=1000)
    async with running(transport.handle_async_request(sent)) as task:
        peer = await server.accept()
        await peer.head()
        async with running(tick()):
            before = others
            await peer.exactly(1000)
            assert others - before > 100
        peer.send(OK)
        await patient(task)


async def test_early_answer_comes_while_the_body_is_sent(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """A head that comes early is returned at once; sending goes on until both are done."""
    more = asyncio.Event()

    class Halves(Body):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"ab"
            await more.wait()
            yield b"cd"

    response, peer, _ = await ask(
        transport, server, CHUNKED + b"1\r\na\r\n", post(Halves(), length=4)
    )
    assert response.status_code == 200
    more.set()
    assert await peer.exactly(4) == b"abcd"
    peer.send(b"0\r\n\r\n")
    assert await read(response) == b"a"
    await ask_again(transport, peer, OK)


async def test_answer_that_ends_before_the_body_closes_the_connection(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """An early 413: the response is whole, sending stops, the connection is not used again."""
    body = Unending([b"ab"])
    response, peer, _ = await ask(transport, server, OK, post(body))
    assert await read(response) == b"ok"
    assert body.closed.is_set()
    await peer.left()
    await ask(transport, server, OK)
    assert server.connections == 2


@pytest.mark.parametrize("streamed", [False, True], ids=["bytes", "streamed"])
async def test_early_answer_is_not_lost_when_upstream_then_closes(
    transport: UpstreamTransport, server: RawServer, *, streamed: bool
) -> None:
    """A 413 followed by the end of the connection is a 413, not a broken pipe."""
    size = 32 * MIB
    body = Body(b"x" * MIB for _ in range(32)) if streamed else b"x" * size
    answer = b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig"
    async with running(transport.handle_async_request(post(body, length=size))) as task:
        peer = await server.accept()
        await peer.head()
        peer.send(answer)
        await peer.drained()
        peer.close()
        response = await patient(task)
    assert response.status_code == 413
    assert await read(response) == b"big"


@pytest.mark.parametrize("unread", [False, True], ids=["FIN", "RST"])
async def test_answer_that_lies_unread_when_a_write_fails_is_not_lost(
    make: MakeTransport, *, unread: bool
) -> None:
    """The write fails before the loop could read the answer: it is read all the same."""
    listener = socket.create_server(("127.0.0.1", 0))

    class RefusedMeanwhile(Body):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"x" * 1000
            # Without a turn of the loop, upstream answers and closes.
            peer, _ = listener.accept()
            if not unread:
                peer.recv(65536)
            peer.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
            peer.close()
            while True:
                self.pulls += 1
                yield b"x" * 1000

    with listener:
        transport = make(port=listener.getsockname()[1])
        async with asyncio.timeout(PATIENCE_S):
            body = RefusedMeanwhile()
            response = await transport.handle_async_request(post(body))
        assert response.status_code == 413
        assert await read(response) == b"big"
        assert body.pulls < 3


async def test_half_closed_upstream_ends_an_upload(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """Upstream that ends its side without an answer and reads nothing more: an error, no hang."""
    body = Body(b"x" * MIB for _ in range(64))
    async with running(transport.handle_async_request(post(body, length=64 * MIB))) as task:
        peer = await server.accept()
        (connection,) = transport._connections
        await until(lambda: connection._write_paused)
        peer.send_eof()
        with pytest.raises(httpx.RemoteProtocolError, match="without an answer"):
            await patient(task)
    assert body.closed.is_set()


@pytest.mark.parametrize("chunks", [[], [b"abc"]], ids=["at once", "later"])
async def test_failing_body_is_raised_as_it_is(
    transport: UpstreamTransport, server: RawServer, chunks: list[bytes]
) -> None:
    """The caller's own exception comes back to it, and upstream sees half a request and the end."""
    failure = LookupError("the client is gone")
    async with running(transport.handle_async_request(post(Body(chunks, then=failure)))) as task:
        peer = await server.accept()
        with pytest.raises(LookupError) as caught:
            await patient(task)
        assert caught.value is failure
        await peer.head()
        assert not (await peer.left()).endswith(b"0\r\n\r\n")


async def test_body_that_fails_after_the_head_ends_the_response(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """After the head the exception is raised where the response is read."""
    fail = asyncio.Event()

    class Failing(Body):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"ab"
            await fail.wait()
            raise LookupError

    response, peer, _ = await ask(transport, server, CHUNKED, post(Failing()))
    async with running(read(response)) as task:
        await turns(3)
        fail.set()
        with pytest.raises(LookupError):
            await patient(task)
    await peer.left()


async def test_upload_that_upstream_breaks_off_is_a_write_error(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """Upstream resets while the body is sent: WriteError, and the iterator is closed."""
    body = Body(b"x" * MIB for _ in range(64))
    async with running(transport.handle_async_request(post(body, length=64 * MIB))) as task:
        peer = await server.accept()
        (connection,) = transport._connections
        await until(lambda: connection._write_paused)
        peer.reset()
        with pytest.raises(httpx.WriteError):
            await patient(task)
    assert body.closed.is_set()


# Leaving.


async def test_cancel_before_the_head_closes_the_connection(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """Upstream sees the client leave while it still thinks."""
    async with running(transport.handle_async_request(request())) as task:
        peer = await server.accept()
        await peer.head()
        task.cancel()
        assert await peer.left() == b""
    assert task.cancelled()
    await until(lambda: not transport._connections)


async def test_cancel_during_an_upload_stops_it(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """When the call has returned, nothing pulls the caller's body any more."""
    body = Unending([b"abc"])
    async with running(transport.handle_async_request(post(body))) as task:
        peer = await server.accept()
        await peer.head()
        await peer.exactly(8)
        task.cancel()
        await asyncio.wait([task])
        assert body.closed.is_set()
        await peer.left()


async def test_cancel_while_connecting(transport: UpstreamTransport, server: RawServer) -> None:
    """A caller that leaves at once leaves nothing behind."""
    async with running(transport.handle_async_request(request())) as task:
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert not transport._connections


async def test_aclose_in_the_body_closes_the_connection(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """A body that is not read to its end is upstream's sign to stop; twice is as good as once."""
    response, peer, _ = await ask(transport, server, CHUNKED + b"1\r\na\r\n")
    async for chunk in stream_of(response):
        assert chunk == b"a"
        break
    await stream_of(response).aclose()
    await stream_of(response).aclose()
    assert await peer.left() == b""
    with pytest.raises(httpx.StreamClosed):
        await read(response)
    with pytest.raises(httpx.StreamClosed):
        await piped(response)


async def test_aclose_after_the_end_keeps_the_connection(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """Closing what has ended harms nobody, also when another request has the connection."""
    response, peer, _ = await ask(transport, server, OK)
    await read(response)
    async with running(transport.handle_async_request(request())) as task:
        await peer.head()
        await stream_of(response).aclose()
        await turns(3)
        peer.send(OK)
        assert await read(await patient(task)) == b"ok"


async def test_closed_body_does_not_look_whole(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """Bytes that were dropped by aclose are missed, also when upstream had ended properly."""
    response, _, _ = await ask(transport, server, OK)
    chunks = aiter(stream_of(response))
    await stream_of(response).aclose()
    with pytest.raises(httpx.StreamClosed):
        await anext(chunks)


@pytest.mark.parametrize("pushed", [False, True], ids=["iterated", "pushed"])
async def test_aclose_beside_a_reader_ends_it(
    transport: UpstreamTransport, server: RawServer, *, pushed: bool
) -> None:
    """Whoever still reads is told that the stream was closed."""
    response, peer, _ = await ask(transport, server, CHUNKED)
    reading: Coroutine[None, None, object] = piped(response) if pushed else read(response)
    async with running(reading) as task:
        await turns(3)
        await stream_of(response).aclose()
        with pytest.raises(httpx.StreamClosed):
            await patient(task)
    assert await peer.left() == b""


async def test_cancelled_pipe_closes_the_connection(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """Cancelling the push is leaving; the request's body is not pulled any more either."""
    body = Unending([b"abc"])
    response, peer, _ = await ask(transport, server, CHUNKED, post(body))
    await peer.exactly(8)
    async with running(stream_of(response).pipe_to(lambda _: None)) as task:
        await turns(3)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert body.closed.is_set()
        assert await peer.left() == b""


async def test_aclose_of_the_transport_ends_everything(
    make: MakeTransport, server: RawServer
) -> None:
    """Idle, waiting and streaming connections close; their users are told; later ones refused."""
    transport = make()
    idle = await idle_connection(transport, server)
    async with running(transport.handle_async_request(request())) as streaming:
        await idle.head()
        idle.send(CHUNKED)
        response = await patient(streaming)
    waiting_peer_task = server.accept()
    async with running(transport.handle_async_request(request())) as waiting:
        peer = await waiting_peer_task
        await peer.head()
        await transport.aclose()
        await transport.aclose()
        assert not transport._connections
        with pytest.raises(httpx.ReadError, match="closed"):
            await patient(waiting)
        with pytest.raises(httpx.ReadError, match="closed"):
            await read(response)
        assert await peer.left() == b""
        assert await idle.left() == b""
    with pytest.raises(httpx.ConnectError, match="closed"):
        await transport.handle_async_request(request())
    await turns(3)
    assert server.connections == 2


async def test_aclose_of_the_transport_while_connecting(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """A connection that comes after the end is closed, and its caller told."""
    async with running(transport.handle_async_request(request())) as task:
        await asyncio.sleep(0)
        await transport.aclose()
        with pytest.raises(httpx.ConnectError, match="closed"):
            await patient(task)


# Push and pull.


async def test_push_keeps_order_and_joins_what_came_in_one_read(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """One read is one call of the sink, however many HTTP chunks it holds."""
    response, peer, _ = await ask(transport, server, CHUNKED)
    calls: list[bytes] = []
    async with running(stream_of(response).pipe_to(calls.append)) as task:
        await turns(3)
        peer.send(b"1\r\na\r\n2\r\nbc\r\n")
        await until(lambda: len(calls) == 1)
        peer.send(b"3\r\nde")
        await until(lambda: len(calls) == 2)
        peer.send(b"f\r\n1\r\ng\r\n0\r\n\r\n")
        await patient(task)
    assert calls == [b"abc", b"de", b"fg"]


async def test_push_begins_with_what_had_come_before(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """Chunks that came with the head, or before the push began, come first and as one."""
    response, peer, _ = await ask(transport, server, CHUNKED + b"1\r\na\r\n")
    peer.send(b"1\r\nb\r\n")
    stream = stream_of(response)
    await until(lambda: stream._unread == 2)
    async with running(piped(response)) as task:
        await turns(3)
        peer.send(b"1\r\nc\r\n0\r\n\r\n")
        assert await patient(task) == [b"ab", b"c"]


@pytest.mark.parametrize("early", [b"", b"1\r\na\r\n"], ids=["nothing yet", "with the head"])
async def test_push_tells_how_much_has_come(
    transport: UpstreamTransport, server: RawServer, early: bytes
) -> None:
    """The body's size, transfer-decoded, is known at its end."""
    response, peer, _ = await ask(transport, server, CHUNKED + early)
    stream = stream_of(response)
    async with running(piped(response)) as task:
        await turns(3)
        peer.send(b"2\r\nbc\r\n1\r\nd\r\n0\r\n\r\n")
        assert b"".join(await patient(task)) == (b"abcd" if early else b"bcd")
    assert stream.received == (4 if early else 3)


async def test_push_wakes_no_task_per_chunk(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """The sink runs in the read callback: between two chunks no task of ours runs."""
    response, peer, _ = await ask(transport, server, CHUNKED)
    callers: list[asyncio.Task[object] | None] = []
    async with running(
        stream_of(response).pipe_to(lambda _: callers.append(asyncio.current_task()))
    ) as task:
        await turns(3)
        for count in range(1, 4):
            peer.send(b"1\r\na\r\n")
            await until(lambda count=count: len(callers) == count)  # type: ignore[misc]
        peer.send(b"0\r\n\r\n")
        await patient(task)
    assert callers == [None, None, None]


@pytest.mark.parametrize("at", [0, 1], ids=["first chunk", "later chunk"])
async def test_failing_sink_closes_the_connection(
    transport: UpstreamTransport, server: RawServer, at: int
) -> None:
    """The sink's exception is raised by pipe_to, as it is; the sink is not called again."""
    failure = LookupError("no more")
    calls: list[bytes] = []

    def sink(chunk: bytes) -> None:
        calls.append(chunk)
        if len(calls) > at:
            raise failure

    response, peer, _ = await ask(transport, server, CHUNKED + b"1\r\na\r\n")
    stream = stream_of(response)
    await until(lambda: stream._unread == 1)
    async with running(stream.pipe_to(sink)) as task:
        await turns(3)
        peer.send(b"1\r\nb\r\n")
        with pytest.raises(LookupError) as caught:
            await patient(task)
    assert caught.value is failure
    assert len(calls) == at + 1
    await peer.left()


class ChunkSink:
    """Takes whole chunks of letters as they are, and the rest as body; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.chunks: list[bytes] = []
        self.body: list[bytes] = []
        self.failure: Exception | None = None

    def __call__(self, read: bytes) -> int:
        """Take a read, or not."""
        self.asked.append(read)
        size = data_size(read)
        if not size or not read[-2 - size : -2].isalpha():
            return 0
        if self.failure is not None:
            raise self.failure
        self.chunks.append(read)
        return size


WHOLE, LETTERS = b"5\r\nhello\r\n", b"3\r\nabc\r\n"


@pytest.mark.parametrize(
    ("reads", "chunks", "body"),
    [
        ([WHOLE, LETTERS], [WHOLE, LETTERS], b""),
        ([WHOLE[:4], WHOLE[4:], LETTERS], [LETTERS], b"hello"),
        ([WHOLE[:2], WHOLE[2:], LETTERS], [LETTERS], b"hello"),
        ([WHOLE[:-1], WHOLE[-1:], LETTERS], [LETTERS], b"hello"),
        ([WHOLE + LETTERS, LETTERS], [LETTERS], b"helloabc"),
        ([b"5;x=y\r\nhello\r\n", LETTERS], [LETTERS], b"hello"),
        ([b"3\r\n1 2\r\n", LETTERS], [LETTERS], b"1 2"),
        # What looks like a chunk within a chunk is a part of its data.
        ([b"10\r\n" + LETTERS, LETTERS, b"\r\n", WHOLE], [WHOLE], LETTERS + LETTERS),
    ],
)
async def test_whole_chunks_are_offered_as_they_are(
    transport: UpstreamTransport,
    server: RawServer,
    reads: list[bytes],
    chunks: list[bytes],
    body: bytes,
) -> None:
    """Where a chunk begins, and only there; what is not taken the parser reads on with."""
    response, peer, _ = await ask(transport, server, CHUNKED)
    stream, sink = stream_of(response), ChunkSink()
    async with running(stream.pipe_to(sink.body.append, sink)) as task:
        await turns(3)
        assert stream._connection is not None
        for read in reads:
            stream._connection.data_received(read)  # sockets would join some of them
        assert (sink.chunks, b"".join(sink.body)) == (chunks, body)
        peer.send(b"0\r\n\r\n")
        await patient(task)
    assert stream.received == len(body) + sum(map(data_size, chunks))
    await ask_again(transport, peer, OK)


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"]
)
async def test_no_chunks_are_seen_where_there_are_none(
    transport: UpstreamTransport, server: RawServer, head: bytes
) -> None:
    """A body with a length, or one that ends with the connection, may look like chunks."""
    response, peer, _ = await ask(transport, server, head)
    sink = ChunkSink()
    async with running(stream_of(response).pipe_to(sink.body.append, sink)) as task:
        peer.send(WHOLE + LETTERS)
        peer.close()
        await patient(task)
    assert (sink.asked, b"".join(sink.body)) == ([], WHOLE + LETTERS)


async def test_chunk_sink_is_asked_for_its_own_body_only(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """The next body on the connection, not read yet, is nobody's to take."""
    response, peer, _ = await ask(transport, server, CHUNKED)
    sink = ChunkSink()
    async with running(stream_of(response).pipe_to(sink.body.append, sink)) as task:
        await turns(3)
        peer.send(WHOLE)
        await until(lambda: sink.chunks == [WHOLE])
        peer.send(b"0\r\n\r\n")
        await patient(task)
    response, _ = await ask_again(transport, peer, CHUNKED)
    peer.send(LETTERS)
    await until(lambda: stream_of(response)._unread == 3)
    peer.send(b"0\r\n\r\n")
    assert await read(response) == b"abc"
    assert sink.chunks == [WHOLE]


async def test_chunk_sink_that_fails(transport: UpstreamTransport, server: RawServer) -> None:
    """Its exception is raised by pipe_to, as a sink's is, and the connection is closed."""
    response, peer, _ = await ask(transport, server, CHUNKED)
    sink = ChunkSink()
    sink.failure = LookupError("no more")
    async with running(stream_of(response).pipe_to(sink.body.append, sink)) as task:
        await turns(3)
        peer.send(WHOLE)
        with pytest.raises(LookupError) as caught:
            await patient(task)
    assert caught.value is sink.failure
    await peer.left()


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="Linux knows it")
async def test_events_are_not_acknowledged_one_by_one(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """The kernel is told so for each connection."""
    await ask(transport, server, CHUNKED)
    (connection,) = transport._connections
    assert connection._transport is not None
    upstream = connection._transport.get_extra_info("socket")
    assert upstream.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 0


async def test_pause_stops_reading_and_upstream_feels_it(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """After pause() no chunk comes and upstream's writes block; resume() brings all of it."""
    size = 32 * MIB
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
    response, peer, _ = await ask(transport, server, head)
    stream = stream_of(response)
    received = 0

    def sink(chunk: bytes) -> None:
        nonlocal received
        received += len(chunk)
        if received == len(chunk):
            stream.pause()
            stream.pause()

    async with running(stream.pipe_to(sink)) as task:
        await turns(3)
        peer.send(b"x" * size)
        await until(lambda: received > 0)
        first = received
        await turns()
        assert received == first
        assert peer.unsent > 0
        stream.resume()
        stream.resume()
        await patient(task)
    assert received == size
    stream.pause()  # after the end it holds nobody back
    await ask_again(transport, peer, OK)


async def test_pause_before_the_push_holds(transport: UpstreamTransport, server: RawServer) -> None:
    """A pause is the reader's own: beginning to push does not undo it."""
    response, peer, _ = await ask(transport, server, CHUNKED)
    stream = stream_of(response)
    stream.pause()
    calls: list[bytes] = []
    async with running(stream.pipe_to(calls.append)) as task:
        peer.send(b"1\r\na\r\n0\r\n\r\n")
        await turns()
        assert calls == []
        stream.resume()
        await patient(task)
    assert calls == [b"a"]


@pytest.mark.parametrize("pushed", [False, True], ids=["iterated", "pushed"])
async def test_unread_body_is_bounded(
    transport: UpstreamTransport, server: RawServer, *, pushed: bool
) -> None:
    """A reader that does not come holds upstream back; when it comes, nothing is missing."""
    size = 32 * MIB
    data = bytes(range(256)) * (size // 256)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
    response, peer, _ = await ask(transport, server, head + data)
    stream = stream_of(response)
    await until(lambda: stream._unread > 256 * 1024)
    await turns()
    assert stream._unread <= 512 * 1024
    assert peer.unsent > 0
    got = b"".join(await piped(response)) if pushed else await read(response)
    assert got == data
    await ask_again(transport, peer, OK)


async def test_large_body_that_has_ended_is_read_after_its_connection_went_on(
    transport: UpstreamTransport, server: RawServer
) -> None:
    """A connection is free when its response has come, read or not; also if reading was paused."""
    size = 300 * 1024
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size
    response, peer, _ = await ask(transport, server, answer)
    stream = stream_of(response)
    await until(lambda: stream._unread == size)
    await until(lambda: len(transport._idle) == 1)
    other, _ = await ask_again(transport, peer, OK)
    assert await read(response) == b"x" * size
    assert await read(other) == b"ok"


async def test_body_is_read_by_one_reader(transport: UpstreamTransport, server: RawServer) -> None:
    """A second reader beside the first is a mistake that is told."""
    response, _, _ = await ask(transport, server, CHUNKED)
    async with running(piped(response)):
        await turns(3)
        with pytest.raises(RuntimeError, match="already"):
            await piped(response)
