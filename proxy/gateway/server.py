"""Both ports on one event loop, from bind to the last byte."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import os
import resource
import signal
import socket
from functools import partial
from typing import TYPE_CHECKING

import structlog
import uvicorn

from proxy.errors import SettingsError
from proxy.gateway.app import Gateway
from proxy.gateway.head import HeadLimits
from proxy.gateway.open_files import OpenFiles
from proxy.gateway.protocol import LastwordProtocol
from proxy.settings import Background, unknown_variables

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from starlette.types import ASGIApp

    from proxy.settings import Settings

__all__ = ["Running", "listening", "running", "serve"]

BACKLOG = 2048
# Longer than the 60 s that gateways in front keep their connections: the client closes first.
CLIENT_KEEPALIVE_S = 75
# What the server still waits when everything that could be ended properly has been.
LAST_GRACE_S = 1
_COLLECT_AFTER = 10_000  # objects made and not freed since, 700 by default
# Files that are no stream's: listeners, the event loop, the store, logs, the admin port's clients.
OWN_FILES = 64
# What a proxy should be able to hold where --max-streams does not say.
USUAL_STREAMS = 4096

log = structlog.stdlib.get_logger("lastword")


class _Server(uvicorn.Server):
    """uvicorn's server, stopped by a call instead of by signals and ten looks a second.

    Two servers in one process would fight over the signals.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Take no new connections and end."""
        self.should_exit = True
        self._stopped.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to ``serve``."""
        yield

    async def main_loop(self) -> None:
        """Serve until told to stop."""
        await self._stopped.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close what is idle, give the rest a last moment, then cut it off."""
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_GRACE_S):
                while state.connections or state.tasks:  # noqa: ASYNC110 - uvicorn tells nobody
                    await asyncio.sleep(0.01)
        tasks = list(state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(state.connections):
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()


class Running:
    """A proxy that listens: the addresses of its two ports."""

    def __init__(self, gateway: Gateway, traffic: socket.socket, admin: socket.socket) -> None:
        self.gateway = gateway
        self.url = _url(traffic)
        self.admin_url = _url(admin)


@contextlib.asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Running]:
    """Serve both ports until the block is left; then running requests get ``shutdown_grace_s``.

    Raises ``SettingsError`` if a port cannot be bound.
    """
    async with contextlib.AsyncExitStack() as stack:
        traffic = stack.enter_context(_bind(settings.host, settings.port, "--port"))
        admin = stack.enter_context(_bind(settings.admin_host, settings.admin_port, "--admin-port"))
        gateway = Gateway(settings)
        stack.push_async_callback(gateway.aclose)
        await gateway.start()
        protocol = partial(
            LastwordProtocol,
            limits=HeadLimits(
                max_headers=settings.max_headers,
                max_bytes=settings.max_header_bytes,
                timeout_s=settings.header_timeout_s,
            ),
            stall_s=settings.write_stall_s,
            on_refused=gateway.metrics.count_refused,
            held=gateway.held,
        )
        await stack.enter_async_context(_serving(gateway.admin, admin, http=protocol))
        guarded = partial(protocol, files=OpenFiles())
        await stack.enter_async_context(_serving(gateway.traffic, traffic, http=guarded))
        stack.push_async_callback(gateway.shut_down)
        yield Running(gateway, traffic, admin)


@contextlib.asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """Serve any application on a free loopback port and give its URL."""
    with _bind("127.0.0.1", 0, "the port") as listener:
        async with _serving(app, listener, http="httptools"):
            yield _url(listener)


@contextlib.asynccontextmanager
async def _serving(
    app: ASGIApp, listener: socket.socket, *, http: Callable[..., LastwordProtocol] | str
) -> AsyncIterator[None]:
    """Serve one application until the block is left, and then until its requests are done."""
    server = _server(app, http=http)
    task = asyncio.create_task(server.serve(sockets=[listener]))  # noqa: TID251 - awaited below
    try:
        while not (server.started or task.done()):  # noqa: ASYNC110 - uvicorn offers no event
            await asyncio.sleep(0.005)
        yield
    finally:
        server.stop()
        await task


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP; a second one ends at once what still runs."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    _check_file_limit(_raise_file_limit(), settings.max_streams or USUAL_STREAMS)
    if settings.keeps_copies and not _is_loopback(settings.host):
        log.warning(
            "requests without any of the owner headers share one anonymous owner: whoever reaches"
            " this port without them can read and cancel each other's background responses",
            owner_headers=settings.owner_headers,
        )
    if unknown := unknown_variables(os.environ):
        log.warning("variables that are no settings have no effect", variables=unknown)
    wanted = {Background.UPSTREAM, Background.PROXY}  # AUTO is the default, and asks for nothing
    if settings.background in wanted and not settings.keeps_copies:
        log.warning(
            "no copies of background responses are kept unless correct is on",
            background=settings.background.value,
            correct=settings.correct.value,
        )
    async with running(settings) as proxy:

        def on_signal() -> None:
            """Begin to stop; when told again, wait for nobody."""
            if stop.is_set():
                proxy.gateway.drain.hurry()
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                loop.add_signal_handler(number, on_signal)
        _calm_collector()
        log.info(
            "ready",
            url=proxy.url,
            admin=proxy.admin_url,
            upstream=settings.upstream,
            correct=settings.correct.value,
        )
        await stop.wait()
        log.info("stopping", grace_s=settings.shutdown_grace_s)
    log.info("stopped")


def _server(app: ASGIApp, *, http: Callable[..., LastwordProtocol] | str) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http=http,  # type: ignore[arg-type]  # any callable that makes a protocol will do
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=CLIENT_KEEPALIVE_S,
            backlog=BACKLOG,
        )
    )


def _bind(host: str, port: int, option: str) -> socket.socket:
    try:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=BACKLOG,
        )
    except OSError as error:
        raise SettingsError(f"{option}: {host}:{port} cannot be bound: {error.strerror}") from error


def _raise_file_limit() -> int:
    """Allow this process as many open files as it may have, and return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # the system knows a lower limit still
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _check_file_limit(files: int, wanted: int) -> None:
    """Warn if the limit of open files, not the settings, is what bounds the streams at once."""
    if files == resource.RLIM_INFINITY:
        return
    streams = max(0, files - OWN_FILES) // 2  # one to the client, one to vLLM
    if streams < wanted:
        log.warning(
            "the limit of open files allows fewer streams at once than may come; raise it"
            " (ulimit -n, LimitNOFILE), or set --max-streams below it",
            open_files=files,
            streams=streams,
            wanted=wanted,
        )


def _calm_collector() -> None:
    """Let the garbage collector look less often, and never again at what the start has made.

    A request leaves a few cycles of small objects; with Python's own threshold the collector takes
    a fifteenth of the time of small requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
