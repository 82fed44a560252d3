"""A scriptable upstream on a raw socket: it can misbehave at every byte.

A real HTTP server would be too well-mannered. This one reads requests exactly as they came and
leaves the answer to a script, an `async def handler(exchange)`, whose verbs stop at nothing.
It lives on the test's own event loop, so tests order what happens by gates instead of by sleeping.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Literal, Self

from tests.fake_connection import Connection, HungUp, Request
from tests.waiting import PATIENCE_S, Gate, Signal

if TYPE_CHECKING:
    from types import TracebackType

BODILESS = {204, 304}


class Exchange:
    """One request together with the means to answer it, well or badly."""

    def __init__(self, fake: FakeVllm, connection: Connection, request: Request) -> None:
        self.fake = fake
        self.request = request
        self.finished = asyncio.Event()
        self.ended = False
        self.chunked = False
        self._connection = connection
        self._handed = 0

    @property
    def written(self) -> int:
        """How many bytes of the answer the kernel has taken from the script so far."""
        return self._handed - self._connection.unsent

    @property
    def closed(self) -> bool:
        """Whether the proxy has hung up."""
        return self._connection.closed

    # What the script may wait for.

    async def gate(self, name: str) -> None:
        """Wait until the test opens this gate."""
        await self.fake.gate(name).pass_through()

    async def read_body(self) -> bytes:
        """Wait for the whole body of the request."""
        await self.fake.signal.until(lambda: self.request.complete or self.closed)
        if not self.request.complete:
            raise HungUp
        return bytes(self.request.body)

    async def wait_closed(self) -> None:
        """Wait until the proxy hangs up."""
        await self.fake.signal.until(lambda: self.closed)

    def pause_reading(self) -> None:
        """Take nothing more from the socket: a proxy that sends on is held back."""
        self._connection.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._connection.transport.resume_reading()

    # What the script may say.

    async def respond(
        self, status: int, headers: Iterable[tuple[str, str]] = (), *, framed: bool = True
    ) -> None:
        """Send the head as vLLM's server does: Date, Server, then the headers, then the framing.

        The framing is chunked unless a header says otherwise; with framed=False it is left out
        and the body ends with the connection.
        """
        lines = [b"HTTP/1.1 %d Whatever" % status]
        lines += [b"date: Sun, 29 Nov 2026 15:16:40 GMT", b"server: uvicorn"]
        lines += [f"{name}: {value}".encode("latin-1") for name, value in headers]
        names = {name.lower() for name, _ in headers}
        self.chunked = (
            framed
            and status not in BODILESS
            and self.request.method != "HEAD"
            and not names & {"content-length", "transfer-encoding"}
        )
        if self.chunked:
            lines.append(b"transfer-encoding: chunked")
        await self.send_raw(b"\r\n".join(lines) + b"\r\n\r\n")

    async def send(self, data: bytes) -> None:
        """Send a piece of the body: one HTTP chunk where the answer is chunked."""
        await self.send_raw(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    async def send_raw(self, data: bytes) -> None:
        """Write bytes as they are and wait until the kernel has taken them."""
        self._handed += len(data)
        await self._connection.write(data)

    async def end(self) -> None:
        """End the body properly; the connection stays open where its framing allows."""
        if self.chunked:
            await self.send_raw(b"0\r\n\r\n")
        self.ended = True

    async def answer(
        self, status: int, headers: Iterable[tuple[str, str]] = (), body: bytes = b""
    ) -> None:
        """Send a whole answer with its length, after the whole request was read."""
        await self.read_body()
        length = [] if status in BODILESS else [("content-length", str(len(body)))]
        await self.respond(status, [*headers, *length])
        if self.request.method != "HEAD" and status not in BODILESS:
            await self.send_raw(body)
        self.ended = True

    async def cut(self) -> None:
        """Close the connection (FIN) where it stands."""
        self._connection.close()

    async def reset(self) -> None:
        """Break the connection (RST) where it stands."""
        self._connection.reset()

    async def half_close(self) -> None:
        """Send FIN and go on listening: what a server's idle time-out looks like."""
        self._connection.transport.write_eof()

    # What the test may wait for.

    async def until_closed(self) -> None:
        """Wait, in the test, until the proxy has hung up."""
        await self.fake.until(lambda: self.closed)

    async def until_finished(self) -> None:
        """Wait, in the test, until the script has run to its end."""
        await self.fake.until(self.finished.is_set)

    async def until_stalled(self, quiet_s: float = 0.3) -> int:
        """Wait until nothing more can be written (or the script is done); say how much was.

        A pause that only looks like a stall makes a test weaker, never red.
        """
        async with asyncio.timeout(PATIENCE_S):
            while not self.finished.is_set():
                before = self.written
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(quiet_s):
                        await self.finished.wait()
                if self.written == before:
                    break
        return self.written


Handler = Callable[[Exchange], Awaitable[None]]


class FakeVllm:
    """The upstream: an async context manager that listens on 127.0.0.1 and a port of its own.

    Requests are answered by the scripts in `queue`, one each, and after those by `handler`.
    """

    def __init__(self, handler: Handler | None = None) -> None:
        self.handler = handler
        self.queue: deque[Handler] = deque()
        self.accept: Literal["serve", "close", "reset"] = "serve"
        self.send_buffer: int | None = None
        """SO_SNDBUF of connections accepted from now on; small, it shows backpressure soon."""
        self.exchanges: list[Exchange] = []
        self.connections = 0
        self.port = 0
        self.signal = Signal()
        self.open: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.failures: list[Exception] = []
        self._gates: dict[str, Gate] = {}
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Where the fake listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def requests(self) -> list[Request]:
        """Every request so far, in the order in which their heads were complete."""
        return [exchange.request for exchange in self.exchanges]

    def gate(self, name: str) -> Gate:
        """Name a place where scripts wait."""
        return self._gates.setdefault(name, Gate())

    def close_gates(self) -> None:
        """Forget all gates: scripts that come from now on wait again."""
        self._gates.clear()

    def script(self, *handlers: Handler) -> None:
        """Answer the next requests with these, one each."""
        self.queue.extend(handlers)

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait, in the test, until something holds of the fake."""
        async with asyncio.timeout(PATIENCE_S):
            await self.signal.until(predicate)

    async def exchange(self, index: int = 0) -> Exchange:
        """Wait for the head of a request (counted from 0 over all connections)."""
        await self.until(lambda: len(self.exchanges) > index)
        return self.exchanges[index]

    async def listen(self) -> None:
        """Listen, on the same port as before if there was one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop_listening(self) -> None:
        """Refuse new connections; the open ones live on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def drop_connections(self) -> None:
        """Close every open connection and wait until they are gone."""
        for connection in list(self.open):
            connection.close()
        await self.until(lambda: not self.open)

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop_listening()
        while self.tasks:
            for task in list(self.tasks):
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
        for connection in list(self.open):
            connection.transport.abort()
        await self.until(lambda: not self.open)
        if self.failures and error is None:
            raise ExceptionGroup("scripts of the fake failed", self.failures)

    def begin(self, connection: Connection, request: Request) -> None:
        """Start a script for a request whose head is complete."""
        exchange = Exchange(self, connection, request)
        self.exchanges.append(exchange)
        handler = self.queue.popleft() if self.queue else self.handler or _unexpected
        task = asyncio.create_task(self._run(handler, exchange, connection))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _run(self, handler: Handler, exchange: Exchange, connection: Connection) -> None:
        request = exchange.request
        try:
            await handler(exchange)
            if exchange.ended:
                await self.signal.until(lambda: request.complete or exchange.closed)
            elif not connection.closing:
                self.failures.append(AssertionError(f"left open: {request.raw_head!r}"))
        except HungUp:
            pass
        except Exception as error:  # noqa: BLE001 -- raised again when the fake is left
            self.failures.append(error)
        finally:
            exchange.finished.set()
            if exchange.ended and not exchange.closed and request.keeps_alive:
                connection.next_request()
            else:
                connection.close()
            self.signal.notify()


async def _unexpected(exchange: Exchange) -> None:
    raise AssertionError(f"no script for {exchange.request.raw_head!r}")
