"""What is under test: one entry per server, each a way to start it in front of the upstream."""

from __future__ import annotations

import contextlib
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.bench.processes import await_port, free_port, pinned
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path


@dataclass(frozen=True)
class Running:
    """A server that listens; pid 0 is none at all."""

    port: int
    pid: int


@dataclass(frozen=True)
class Server:
    """One server: how it is started, and what is missing here to start it (or nothing)."""

    name: str
    start: Callable[[int, int, Path], AbstractContextManager[Running]]
    """Takes upstream's port, the core, and a folder for files of its own."""
    lacks: Callable[[], str] = lambda: ""


@contextlib.contextmanager
def _direct(upstream: int, core: int, folder: Path) -> Iterator[Running]:
    """No server: what the upstream and the client cost and take by themselves."""
    yield Running(upstream, 0)


_NGINX_CONF: Final = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{ worker_connections 16384; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream vllm {{ server 127.0.0.1:{upstream}; keepalive 2048; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://vllm;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $host;
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


@contextlib.contextmanager
def _nginx(upstream: int, core: int, folder: Path) -> Iterator[Running]:
    """Start Debian's nginx, passing through as an operator would set it for streams."""
    port = free_port()
    conf = folder / "nginx.conf"
    conf.write_text(_NGINX_CONF.format(folder=folder, upstream=upstream, port=port))
    log = folder / "nginx.log"
    command = [_nginx_path() or "nginx", "-c", str(conf), "-p", str(folder), "-e", str(log)]
    with pinned(command, core=core, log=log) as process:
        await_port(process, port, log)
        yield Running(port, process.pid)


def _nginx_path() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def _lastword(
    upstream: int,
    core: int,
    folder: Path,
    *,
    background: str = "pass",
    store: str = "memory:",
    environment: dict[str, str] | None = None,
) -> Iterator[Running]:
    """Start this project's proxy as its command line does.

    Every request asks for a background response; `pass` relays it, `proxy` records it.
    """
    port = free_port()
    log = folder / "lastword.log"
    command = [sys.executable, "-m", "proxy", "serve"]
    command += ["--upstream", f"http://127.0.0.1:{upstream}", "--background", background]
    command += ["--store", store.format(folder=folder)]
    command += ["--port", str(port), "--admin-port", "0"]
    with pinned(command, core=core, log=log, environment=environment) as process:
        await_port(process, port, log)
        yield Running(port, process.pid)


@contextlib.contextmanager
def _lastword_redis(upstream: int, core: int, folder: Path) -> Iterator[Running]:
    """Start the proxy with a Redis of its own, whose CPU time is not the proxy's."""
    with RedisServer("redis", folder) as redis, redis_proxy(upstream, core, folder, redis) as proxy:
        yield proxy


@contextlib.contextmanager
def redis_proxy(upstream: int, core: int, folder: Path, redis: RedisServer) -> Iterator[Running]:
    """Start one replica that records in this Redis."""
    secret = {"LASTWORD_OWNER_SECRET": "the same for all of us"}
    with _lastword(
        upstream, core, folder, background="proxy", store=redis.url, environment=secret
    ) as proxy:
        yield proxy


_SQLITE: Final = "sqlite:{folder}/copies.db"

SERVERS: Final = (
    Server("direct", _direct),
    Server(
        "nginx",
        _nginx,
        lambda: "" if _nginx_path() else "not installed (Debian: apt-get install nginx-light)",
    ),
    Server("lastword", _lastword),
    Server("recording", partial(_lastword, background="proxy")),
    Server("recording-sqlite", partial(_lastword, background="proxy", store=_SQLITE)),
    Server("recording-redis", _lastword_redis),
)
