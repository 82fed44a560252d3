"""What is under test: one entry per server, each a way to start it in front of the upstream."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.bench import peers
from tests.bench.processes import Running, free_port, serving
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path


@dataclass(frozen=True)
class Server:
    """One server: how it is started, and what is missing here to start it (or nothing)."""

    name: str
    title: str
    start: Callable[[int, int, Path], AbstractContextManager[Running]]
    """Takes upstream's port, the core, and a folder for files of its own."""
    lacks: Callable[[], str] = lambda: ""
    corrects: bool = False
    """It is there to send the corrected event."""
    must_hold: bool = False
    """An event that it loses and a stream that it ends wrongly fail the run; else they are told."""
    records: bool = False
    """It is asked for background responses."""


def _direct(upstream: int, core: int, folder: Path) -> AbstractContextManager[Running]:
    """No server: what the upstream and the client cost and take by themselves."""
    return contextlib.nullcontext(Running(upstream, 0))


def _lastword(
    upstream: int,
    core: int,
    folder: Path,
    *,
    options: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> AbstractContextManager[Running]:
    """Start this project's proxy as its command line does, with its defaults."""
    port = free_port()
    command = [sys.executable, "-m", "proxy", "serve"]
    command += ["--upstream", f"http://127.0.0.1:{upstream}"]
    command += ["--port", str(port), "--admin-port", "0"]
    command += [option.format(folder=folder) for option in options]
    log = folder / "lastword.log"
    return serving(command, port=port, core=core, log=log, environment=environment)


_RECORD: Final = ("--background", "proxy", "--store")


@contextlib.contextmanager
def redis_proxy(upstream: int, core: int, folder: Path, redis: RedisServer) -> Iterator[Running]:
    """Start one replica that records in this Redis."""
    secret = {"LASTWORD_OWNER_SECRET": "the same for all of us"}
    options = (*_RECORD, redis.url)
    with _lastword(upstream, core, folder, options=options, environment=secret) as proxy:
        yield proxy


@contextlib.contextmanager
def _recording_redis(upstream: int, core: int, folder: Path) -> Iterator[Running]:
    """Start the proxy with a Redis of its own, whose CPU time is not the proxy's."""
    with RedisServer("redis", folder) as redis, redis_proxy(upstream, core, folder, redis) as proxy:
        yield proxy


SERVERS: Final = {
    server.name: server
    for server in (
        Server("direct", "direct, no server", _direct, must_hold=True),
        Server("nginx", "nginx", peers.nginx, peers.nginx_lacks),
        Server("envoy", "Envoy", partial(peers.envoy, lua=False), peers.envoy_lacks),
        Server("envoy-lua", "Envoy + Lua", partial(peers.envoy, lua=True), peers.envoy_lacks),
        Server("agentic-api", "agentic-api", peers.agentic_api, peers.agentic_api_lacks),
        Server("obvious", "FastAPI + httpx", peers.obvious),
        Server("constant", "uvicorn, a constant", peers.constant),
        Server("lastword", "Lastword", _lastword, corrects=True, must_hold=True),
        Server(
            "recording",
            "Lastword, recording in memory",
            partial(_lastword, options=(*_RECORD, "memory:")),
            corrects=True,
            must_hold=True,
            records=True,
        ),
        Server(
            "recording-sqlite",
            "Lastword, recording on SQLite",
            partial(_lastword, options=(*_RECORD, "sqlite:{folder}/copies.db")),
            corrects=True,
            must_hold=True,
            records=True,
        ),
        Server(
            "recording-redis",
            "Lastword, recording in Redis",
            _recording_redis,
            corrects=True,
            must_hold=True,
            records=True,
        ),
    )
}
