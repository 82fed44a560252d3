"""An httpx transport to one fixed origin: connections made, kept, reused and given up.

It sends what it is given and returns what came, byte for byte, and costs little per chunk. Why
our own: httpx's transport spends 100 µs per chunk on its pool and parser, and httpx-aiohttp changes
targets, header bytes and cookies on the wire.
"""

import asyncio
import socket
import ssl
from typing import Final

import httpx

from proxy.upstream.body import UpstreamStream
from proxy.upstream.connection import Connection
from proxy.upstream.request_encoder import OutgoingRequest, encode

__all__ = ["UpstreamStream", "UpstreamTransport"]

# What may be a stale connection's doing; a time-out or the caller's own error is not.
_LOST: Final = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


class UpstreamTransport(httpx.AsyncBaseTransport):
    """Sends requests to one origin over HTTP/1.1, on asyncio or uvloop.

    Idle connections are kept for `keepalive_s` seconds, `max_idle` at most, the newest reused
    first; busy ones are not limited. `server_hostname` is the name that TLS checks (default
    `host`). A response head (or the framing between two chunks) may have
    `max_response_head_bytes`.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        connect_timeout_s: float = 5.0,
        keepalive_s: float = 4.0,
        max_idle: int = 512,
        max_response_head_bytes: int = 256 * 1024,
    ) -> None:
        self._host = host
        self._port = port
        self._origin = f"upstream {host}:{port}"
        self._ssl_context = ssl_context
        self._server_hostname = None if ssl_context is None else server_hostname or host
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._max_idle = max_idle
        self._max_response_head_bytes = max_response_head_bytes
        self._connections: set[Connection] = set()
        self._idle: dict[Connection, float] = {}  # with the time it became idle, oldest first
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send `request` and return its response as soon as its head has come.

        The request line's target is `request.extensions["target"]` if given, else the URL's raw
        path; headers go as they are, none is added. The body goes as `Content-Length` or
        `Transfer-Encoding: chunked` in them says. `request.extensions["timeout"]["read"]` limits
        the wait for the head, in seconds; none by default. Cancelling closes the connection.

        A request is sent a second time, on a new connection, only if its connection was a reused
        one, no byte of an answer had come, and upstream cannot have acted on it twice.

        Raises `httpx.LocalProtocolError` for a request that cannot be sent, `httpx.ConnectError`
        and `httpx.ConnectTimeout`, `httpx.ReadTimeout`, `httpx.ReadError` and `httpx.WriteError`
        for a lost connection, `httpx.RemoteProtocolError` for no or a malformed answer, and
        whatever the request's body raises.
        """
        outgoing = encode(request)
        head_timeout_s = (request.extensions.get("timeout") or {}).get("read")
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._exchange(connection, outgoing, head_timeout_s)
            except _LOST:
                if outgoing.pulled or connection.answered:
                    raise
                if connection.request_sent and not outgoing.idempotent:
                    raise
        return await self._exchange(await self._connect(), outgoing, head_timeout_s)

    async def aclose(self) -> None:
        """Close all connections, idle and busy; readers get `httpx.ReadError`. Idempotent."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        self._idle.clear()
        connections = list(self._connections)
        for connection in connections:
            connection.fail(httpx.ReadError("the upstream transport was closed"))
        if connections:
            await asyncio.wait([connection.lost for connection in connections])

    async def _exchange(
        self, connection: Connection, outgoing: OutgoingRequest, head_timeout_s: float | None
    ) -> httpx.Response:
        stream = UpstreamStream(connection)
        try:
            answer = await connection.begin(
                outgoing,
                stream,
                max_head_bytes=self._max_response_head_bytes,
                head_timeout_s=head_timeout_s,
            )
        except BaseException:
            await stream.aclose()
            raise
        return httpx.Response(
            answer.status,
            headers=answer.headers,
            stream=stream,
            extensions={"http_version": answer.http_version, "reason_phrase": answer.reason},
        )

    async def dial(self, protocol: asyncio.Protocol) -> None:
        """Give `protocol` a connection to the origin, which is none of the transport's then.

        Raises `httpx.ConnectError` and `httpx.ConnectTimeout`.
        """
        try:
            self._check_open()
            async with asyncio.timeout(self._connect_timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: protocol,
                    self._host,
                    self._port,
                    ssl=self._ssl_context,
                    server_hostname=self._server_hostname,
                )
            self._check_open()
        except BaseException as exc:
            error = self._connect_error(exc)
            if error is None:
                raise
            raise error from exc

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(loop, release=self._keep, forget=self._forget)
        try:
            await self.dial(connection)
        except BaseException:
            connection.close()
            raise
        if not connection.lost.done():
            self._connections.add(connection)
        return connection

    def _check_open(self) -> None:
        if self._closed:
            raise httpx.ConnectError("the upstream transport is closed")

    def _connect_error(self, exc: BaseException) -> httpx.TransportError | None:
        match exc:
            case TimeoutError():
                return httpx.ConnectTimeout(
                    f"{self._origin} took no connection within {self._connect_timeout_s:g} s"
                )
            case ConnectionRefusedError():
                return httpx.ConnectError(f"{self._origin} refused the connection")
            case socket.gaierror():
                return httpx.ConnectError(f"{self._origin}: the host name has no address: {exc}")
            case ssl.SSLError():
                return httpx.ConnectError(f"{self._origin}: TLS failed: {exc}")
            case OSError():
                return httpx.ConnectError(f"{self._origin} cannot be reached: {exc}")
        return None

    def _take_idle(self) -> Connection | None:
        """Return the idle connection that was used last, if one is young enough."""
        while self._idle:
            connection, since = self._idle.popitem()
            if not connection.usable:
                continue
            if asyncio.get_running_loop().time() - since < self._keepalive_s:
                return connection
            connection.close()
        return None

    def _keep(self, connection: Connection) -> None:
        """Take back a connection whose response was read to its end."""
        loop = asyncio.get_running_loop()
        self._idle[connection] = loop.time()
        if len(self._idle) > self._max_idle:
            self._drop_oldest()
        if self._sweeper is None and self._idle:
            self._sweeper = loop.call_later(self._keepalive_s, self._sweep)

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._idle))
        del self._idle[oldest]
        oldest.close()

    def _sweep(self) -> None:
        """Drop the connections that upstream may soon drop; come back for the next."""
        self._sweeper = None
        loop = asyncio.get_running_loop()
        while self._idle:
            due = next(iter(self._idle.values())) + self._keepalive_s
            if due > loop.time():
                self._sweeper = loop.call_at(due, self._sweep)
                return
            self._drop_oldest()

    def _forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._idle.pop(connection, None)
