"""uvicorn as Lastword sets it, answering a constant: the least that a request takes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import uvicorn

from tests.bench.upstream import ANSWER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]


async def app(
    scope: dict[str, Any], receive: object, send: Callable[[dict[str, Any]], Awaitable[None]]
) -> None:
    """Answer what the upstream would, without reading the request."""
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": ANSWER})


if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(sys.argv[1]),
        http="httptools",
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
    )
