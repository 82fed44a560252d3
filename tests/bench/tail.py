"""How much later an event reaches a follower on another replica than one on its own.

`python -m tests.bench.tail [--streams N] [--rate N] [--seconds N]`

Two proxies record in one Redis.  Every stream is created on the first and followed on both; each
event carries the time at which upstream sent it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Final

import uvloop

from tests.bench.processes import pinned
from tests.bench.servers import redis_proxy
from tests.redis_server import RedisServer

_STAMP: Final = re.compile(rb'"delta":"(\d{19})"')
_ID: Final = re.compile(rb'"id":"(resp_[0-9a-f]+)"')
_WARM_S: Final = 1.0


async def _follow(reader: asyncio.StreamReader, delays: array[float], since: float) -> None:
    """Note how old each event is when it comes; an event may be cut, a stamp never counts twice."""
    rest = b""
    while data := await reader.read(65536):
        now = time.monotonic_ns()
        rest += data
        for found in _STAMP.finditer(rest):
            if now > since:
                delays.append((now - int(found[1])) / 1e6)
        rest = rest[max((m.end() for m in _STAMP.finditer(rest)), default=0) :][-4096:]


async def _stream(ports: tuple[int, int], body: bytes, delays: list[array[float]]) -> None:
    since = time.monotonic_ns() + _WARM_S * 1e9
    here, up = await asyncio.open_connection("127.0.0.1", ports[0])
    up.write(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
    up.write(b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    head = b""
    while (known := _ID.search(head)) is None:
        head += await here.read(65536)
    there, ask = await asyncio.open_connection("127.0.0.1", ports[1])
    ask.write(b"GET /v1/responses/%b?stream=true HTTP/1.1\r\n" % known[1])
    ask.write(b"Host: x\r\nConnection: close\r\n\r\n")
    await asyncio.gather(_follow(here, delays[0], since), _follow(there, delays[1], since))
    for writer in (up, ask):
        writer.close()


async def _measure(ports: tuple[int, int], options: argparse.Namespace) -> list[array[float]]:
    delays = [array("d"), array("d")]
    deltas = round(options.rate * (options.seconds + _WARM_S))
    body = (
        b'{"model":"bench","input":"Count.","stream":true,"background":true,'
        b'"max_output_tokens":%d,"metadata":{"rate":"%g"}}' % (deltas, options.rate)
    )
    async with asyncio.timeout(options.seconds + 60), asyncio.TaskGroup() as group:
        for _ in range(options.streams):
            group.create_task(_stream(ports, body, delays))
            await asyncio.sleep(0.005)
    return delays


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="lastword-tail-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tests.bench.upstream"]
        with (
            pinned(command, core=cores[0], log=folder / "up.log", stdout=subprocess.PIPE) as up,
            RedisServer("redis", folder) as redis,
        ):
            upstream = int(up.stdout.readline()) if up.stdout else 0
            with (
                redis_proxy(upstream, cores[-1], folder, redis) as here,
                redis_proxy(upstream, cores[-1], folder, redis) as there,
            ):
                delays = uvloop.run(_measure((here.port, there.port), options))
    sys.stdout.write(f"load average {os.getloadavg()[0]:.2f}, {options.streams} streams\n")
    for where, found in zip(("on its own replica", "on another replica"), delays, strict=True):
        ordered = sorted(found)
        p50, p99 = (ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
        sys.stdout.write(f"{where}: p50 {p50:.1f} ms, p99 {p99:.1f} ms, {len(ordered)} events\n")


if __name__ == "__main__":
    main()
