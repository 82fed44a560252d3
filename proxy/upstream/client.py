"""Ask vLLM: one request up, its response's head down, failures as the proxy's own errors."""

from __future__ import annotations

import errno
import socket
import ssl
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, cast
from urllib.parse import urlsplit

import httpx

from proxy.errors import BadRequestError, OriginError, SettingsError, UpstreamError
from proxy.upstream.request_encoder import encode
from proxy.upstream.transport import UpstreamStream, UpstreamTransport
from proxy.upstream.websocket import UpstreamHandshake

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterator, Sequence

    from websockets.typing import Subprotocol

    from proxy.errors import UpstreamTrouble
    from proxy.settings import Settings
    from proxy.upstream.headers import Pairs

__all__ = ["UpstreamClient", "UpstreamResponse", "lost_message"]


class _IterableStream(httpx.AsyncByteStream):
    """A request body that is pulled as the socket takes it."""

    def __init__(self, chunks: AsyncIterable[bytes]) -> None:
        self._chunks = chunks

    async def __aiter__(self):  # type: ignore[no-untyped-def] # noqa: ANN204 - httpx's signature
        async for chunk in self._chunks:
            yield chunk


class UpstreamResponse(Protocol):
    """A response whose head has come: status, header pairs, and the body's stream."""

    status_code: int
    headers: httpx.Headers
    stream: UpstreamStream


class UpstreamClient:
    """One origin's client; it keeps no cookies, follows no redirects, uses no proxies."""

    def __init__(self, settings: Settings) -> None:
        parts = urlsplit(settings.upstream)
        tls = parts.scheme == "https"
        self._name = settings.upstream
        self._origin = httpx.URL(f"{parts.scheme}://{parts.netloc}/")
        self._prefix = parts.path.encode()
        self._read_timeout_s = settings.upstream_idle_s or None
        self.origin_host = parts.netloc.encode()
        self._transport = UpstreamTransport(
            host=cast("str", parts.hostname),
            port=parts.port or (443 if tls else 80),
            ssl_context=_ssl_context(settings) if tls else None,
            connect_timeout_s=settings.connect_timeout_s,
            keepalive_s=settings.upstream_keepalive_s,
        )

    async def open(
        self, method: str, target: bytes, headers: Pairs, body: bytes | AsyncIterable[bytes]
    ) -> UpstreamResponse:
        """Send a request and return when the response's head has come.

        The caller closes ``response.stream``.  Raises ``UpstreamError``: 502 if upstream cannot
        be reached or breaks off, 504 if it does not answer in time; ``BadRequestError`` for a
        request that is no HTTP; and ``OriginError`` for a target that is no path, which the head
        checks must have refused.
        """
        stream = httpx.ByteStream(body) if isinstance(body, bytes) else _IterableStream(body)
        with self._failures():
            response = await self._transport.handle_async_request(
                self._request(method, target, headers, stream)
            )
        return cast("UpstreamResponse", response)

    async def open_websocket(
        self, target: bytes, headers: Pairs, subprotocols: Sequence[Subprotocol]
    ) -> UpstreamHandshake:
        """Ask for a WebSocket and return upstream's answer; raises like ``open``.

        ``subprotocols`` are those that ``headers`` offer. The caller closes what it gets.
        """
        handshake = UpstreamHandshake(subprotocols)
        headers = [*headers, *handshake.request_headers]
        try:
            with self._failures():
                request = self._request("GET", target, headers, httpx.ByteStream(b""))
                head = encode(request).head
                await self._transport.dial(handshake)
                await handshake.exchange(head, self._read_timeout_s)
        except BaseException:
            handshake.close()
            raise
        return handshake

    def _request(
        self, method: str, target: bytes, headers: Pairs, stream: httpx.AsyncByteStream
    ) -> httpx.Request:
        if not target.startswith(b"/") or target.startswith(b"//"):
            raise OriginError("a request target that is no path was about to be sent upstream")
        request = httpx.Request(
            method,
            self._origin,
            headers=headers,
            stream=stream,
            extensions={
                "target": self._prefix + target,
                "timeout": {"read": self._read_timeout_s},
            },
        )
        request.method = method  # httpx would send it in capitals
        return request

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Say what went wrong in the proxy's own errors."""
        try:
            yield
        except httpx.LocalProtocolError as error:
            raise BadRequestError(400, f"The request cannot be passed on: {error}.") from error
        except httpx.ConnectTimeout as error:
            raise self._error(504, "did not accept a connection in time", error) from error
        except httpx.TimeoutException as error:
            raise self._error(504, "did not answer in time", error) from error
        except httpx.ConnectError as error:
            if getattr(error.__cause__, "errno", None) in (errno.EMFILE, errno.ENFILE):
                raise UpstreamError(
                    503,
                    "This proxy has run out of file descriptors and can open no connection; raise"
                    " its limit (ulimit -n, LimitNOFILE) or send it fewer streams.",
                    kind="files",
                    headers=((b"retry-after", b"1"),),
                ) from error
            if isinstance(error.__cause__, ssl.SSLCertVerificationError):
                raise UpstreamError(
                    502,
                    f"The upstream server {self._name} could not be verified:"
                    f" {error.__cause__.verify_message.rstrip('.')}. Name the authority of its"
                    " certificate with --upstream-ca-file, and its host with --upstream as the"
                    " certificate does.",
                    kind="tls",
                ) from error
            raise self._error(502, "cannot be reached", error) from error
        except httpx.TransportError as error:
            raise self._error(502, "broke off before it answered", error) from error

    async def aclose(self) -> None:
        """Close all connections; harmless when repeated."""
        await self._transport.aclose()

    def _error(self, status: int, what: str, error: Exception) -> UpstreamError:
        return UpstreamError(
            status,
            f"The upstream server {self._name} {what}: {error}."
            " Check that vLLM is running and that --upstream is its address.",
            kind=_kind(error),
        )


def lost_message(error: Exception | None) -> str:
    """Say in a sentence for the client how a stream was lost."""
    if error is None:
        return "The upstream server ended the stream before the response was finished."
    if isinstance(error, TimeoutError):
        return "The upstream server was silent for too long before the response was finished."
    return "The connection to the upstream server was lost before the response was finished."


def _kind(error: Exception) -> UpstreamTrouble:
    """Say in a word why upstream could not be asked."""
    cause = error.__cause__
    match error:
        case httpx.ConnectTimeout():
            return "connect_timeout"
        case httpx.TimeoutException():
            return "no_answer"
        case httpx.ConnectError() if isinstance(cause, ConnectionRefusedError):
            return "refused"
        case httpx.ConnectError() if isinstance(cause, socket.gaierror):
            return "dns"
        case httpx.ConnectError() if isinstance(cause, ssl.SSLError):
            return "tls"
        case httpx.ConnectError():
            return "unreachable"
    return "broken"


def _ssl_context(settings: Settings) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(
            cafile=str(settings.upstream_ca_file) if settings.upstream_ca_file else None
        )
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            f"--upstream-ca-file: {settings.upstream_ca_file} cannot be read as PEM certificates:"
            f" {error}"
        ) from error
