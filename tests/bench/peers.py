"""The servers that Lastword is measured beside, each set as an operator sets it for streams."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.bench.processes import Running, free_port, serving

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_NGINX_CONF: Final = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{ worker_connections 16384; }}
http {{
  access_log off;
  keepalive_requests 100000000;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream vllm {{ server 127.0.0.1:{upstream}; keepalive 2048; keepalive_requests 100000000; }}
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

# Each chunk that comes is looked at by itself: an event in two chunks is missed. To put chunks
# together would take a buffer and a parser in Lua, which nobody writes.
_LUA: Final = """
function envoy_on_response(response_handle)
  for chunk in response_handle:bodyChunks() do
    local text = chunk:getBytes(0, chunk:length())
    if text:find('response.completed', 1, true)
        and text:find('"status":"incomplete"', 1, true) then
      chunk:setBytes((text:gsub('response%.completed', 'response.incomplete')))
    end
  end
end
"""
_LUA_FILTER: Final = """
          - name: envoy.filters.http.lua
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua
              default_source_code: {{filename: {script}}}
"""
_ENVOY_CONF: Final = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.\
http_connection_manager.v3.HttpConnectionManager
          stat_prefix: edge
          stream_idle_timeout: 0s
          route_config:
            virtual_hosts:
            - name: vllm
              domains: ["*"]
              routes:
              - match: {{prefix: /}}
                route: {{cluster: vllm, timeout: 0s}}
          http_filters:{filters}
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
  - name: vllm
    type: STATIC
    connect_timeout: 5s
    circuit_breakers:
      thresholds:
      - {{max_connections: 16384, max_pending_requests: 16384, max_requests: 16384}}
    load_assignment:
      cluster_name: vllm
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {upstream}}}}}}}
"""


def nginx(upstream: int, core: int, folder: Path) -> AbstractContextManager[Running]:
    """Start Debian's nginx with one worker, passing through."""
    port = free_port()
    conf = folder / "nginx.conf"
    conf.write_text(_NGINX_CONF.format(folder=folder, upstream=upstream, port=port))
    log = folder / "nginx.log"
    command = [nginx_path() or "nginx", "-c", str(conf), "-p", str(folder), "-e", str(log)]
    return serving(command, port=port, core=core, log=log)


def envoy(upstream: int, core: int, folder: Path, *, lua: bool) -> AbstractContextManager[Running]:
    """Start Envoy with one worker, passing through or with a filter that renames the event."""
    port = free_port()
    script = folder / "rename.lua"
    script.write_text(_LUA)
    filters = _LUA_FILTER.format(script=script).rstrip() if lua else ""
    conf = folder / "envoy.yaml"
    conf.write_text(_ENVOY_CONF.format(port=port, upstream=upstream, filters=filters))
    command = [in_environment("envoy") or "envoy", "-c", str(conf)]
    command += ["--concurrency", "1", "--disable-hot-restart", "-l", "warn"]
    return serving(command, port=port, core=core, log=folder / "envoy.log")


def agentic_api(upstream: int, core: int, folder: Path) -> AbstractContextManager[Running]:
    """Start agentic-api's server on a database of its own."""
    port = free_port()
    command = [in_environment("agentic-server") or "agentic-server"]
    command += ["--llm-api-base", f"http://127.0.0.1:{upstream}", "--skip-llm-ready-check"]
    command += ["--gateway-host", "127.0.0.1", "--gateway-port", str(port)]
    command += ["--db-url", f"sqlite://{folder}/agentic.db"]
    return serving(command, port=port, core=core, log=folder / "agentic.log")


def obvious(upstream: int, core: int, folder: Path) -> AbstractContextManager[Running]:
    """Start the obvious way, ``obvious.py``."""
    return _module("tests.bench.obvious", f"http://127.0.0.1:{upstream}", core=core, folder=folder)


def constant(upstream: int, core: int, folder: Path) -> AbstractContextManager[Running]:
    """Start ``constant.py``: what the server that Lastword stands on takes by itself."""
    return _module("tests.bench.constant", core=core, folder=folder)


def _module(name: str, *arguments: str, core: int, folder: Path) -> AbstractContextManager[Running]:
    port = free_port()
    command = [sys.executable, "-m", name, str(port), *arguments]
    return serving(command, port=port, core=core, log=folder / f"{name}.log")


def nginx_lacks() -> str:
    """Return what is to be done to have nginx here, or nothing."""
    return "" if nginx_path() else "not installed (Debian: apt-get install nginx-light)"


def envoy_lacks() -> str:
    """Return what is to be done to have Envoy here, or nothing."""
    return "" if in_environment("envoy") else "not installed (make bench-peers)"


def agentic_api_lacks() -> str:
    """Return what is to be done to have agentic-api here, or nothing."""
    return "" if in_environment("agentic-server") else "not installed (make bench-peers)"


def nginx_path() -> str | None:
    """Return where nginx is, also where an ordinary user's PATH does not lead."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def in_environment(name: str) -> str | None:
    """Return a command of this Python's environment, or of PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
