"""What the middleware costs per event: the same application on uvicorn, with it and without.

`python -m tests.bench.middleware [--rounds N] [--events N]`

The application sends events that lie ready, each in a turn of the event loop and so in a write of
its own, as tokens come; next to nothing is measured but uvicorn's `send` and the middleware. In a
real vLLM, which makes and serialises every event, its share is far smaller. Both run as processes
of their own by turns, and the medians are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from proxy.middleware import Lastword
from tests.bench.processes import await_port, cpu_s, free_port, pinned

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_CREATED: Final = (
    b'event: response.created\ndata: {"response":{"id":"resp_1","model":"m","status":'
    b'"in_progress"},"sequence_number":0,"type":"response.created"}\n\n'
)
_DELTA: Final = (
    b'event: response.output_text.delta\ndata: {"content_index":0,"delta":" whale",'
    b'"item_id":"msg_0f5e2d3c4b5a69788796a5b4c3d2e1f0","logprobs":[],"output_index":0,'
    b'"sequence_number":%d,"type":"response.output_text.delta"}\n\n'
)
_LAST: Final = (
    b'event: response.completed\ndata: {"response":{"id":"resp_1","model":"m","status":'
    b'"incomplete"},"sequence_number":1000001,"type":"response.completed"}\n\n'
)
_REQUEST: Final = b"POST /v1/responses HTTP/1.1\r\nHost: bench\r\nContent-Length: 0\r\n\r\n"


def _application(events: int) -> Any:
    """Make the application: vLLM's events, one per message."""
    deltas = [_DELTA % number for number in range(1, 1001)]

    async def app(
        scope: dict[str, Any], receive: object, send: Callable[[dict[str, Any]], Awaitable[None]]
    ) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": _CREATED, "more_body": True})
        for number in range(events):
            body = deltas[number % 1000]
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": _LAST, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


def _serve(port: int, events: int, *, wrapped: bool) -> None:
    app = _application(events)
    uvicorn.run(
        Lastword(app) if wrapped else app,
        port=port,
        lifespan="off",
        ws="none",
        log_level="warning",
        access_log=False,
    )


def _measure(events: int, *, wrapped: bool, folder: Path) -> float:
    """Return the CPU time of a fresh server per event, in microseconds."""
    cores = sorted(os.sched_getaffinity(0))
    port = free_port()
    command = [sys.executable, "-m", "tests.bench.middleware", "--events", str(events)]
    command += ["--serve", str(port), *(["--wrapped"] if wrapped else [])]
    log = folder / "server.log"
    with pinned(command, core=cores[-1], log=log) as process:
        await_port(process, port, log)
        end = _read_stream(port)  # the first warms it up
        if (b"response.incomplete" in end) is not wrapped:
            raise SystemExit(f"the stream ended in {end[-200:]!r}")
        before = cpu_s([process.pid])
        _read_stream(port)
        return (cpu_s([process.pid]) - before) / events * 1e6


def _read_stream(port: int) -> bytes:
    """Read one answer whole and return its last bytes."""
    end = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(_REQUEST)
        while not end.endswith(b"\r\n0\r\n\r\n"):
            data = connection.recv(1 << 20)
            if not data:
                raise SystemExit("the server closed the connection")
            end = (end + data)[-1000:]
    return end


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--wrapped", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _serve(options.serve, options.events, wrapped=options.wrapped)
        return
    figures: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for wrapped, results in figures.items():
                results.append(_measure(options.events, wrapped=wrapped, folder=Path(folder)))
    bare, ours = (statistics.median(results) for results in figures.values())
    for name, results in (("without", figures[False]), ("with", figures[True])):
        print(  # noqa: T201 - what it is for
            f"{name:>8}: {statistics.median(results):6.2f} us CPU per event"
            f" ({min(results):.2f} to {max(results):.2f}, {options.rounds} rounds"
            f" of {options.events} events)"
        )
    print(f"   ratio: {ours / bare:.3f} (+{ours - bare:.2f} us per event)")  # noqa: T201 - the same


if __name__ == "__main__":
    main()
