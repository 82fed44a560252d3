"""A vLLM for the demo that needs no vLLM: it plays what a real one has sent."""

from __future__ import annotations

import asyncio
import importlib.resources
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["RECORDED_VERSION", "build_recorded_vllm", "recorded_events"]

RECORDED_VERSION = "0.32.0"
_SECONDS_PER_TOKEN = 0.04
# What vLLM 0.32.0 answers to a background request when its store is off.
_STORE_IS_OFF = (
    b'{"error":{"message":"This vLLM engine does not support `store=True` and therefore does not'
    b" support the background mode. To enable these features, set the environment variable"
    b' `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server.","type":'
    b'"invalid_request_error","param":"background","code":400}}'
)


def recorded_events() -> list[bytes]:
    """Return the events of a stream that vLLM 0.32.0 cut off at its token limit."""
    recordings = importlib.resources.files("proxy.tools") / "recordings"
    data = (recordings / f"vllm-{RECORDED_VERSION}-truncated.http").read_bytes()
    body = data.partition(b"\r\n\r\n")[2]
    return [block + b"\n\n" for block in body.split(b"\n\n")[:-1]]


def build_recorded_vllm() -> FastAPI:
    """Return an application that answers every create with the recording, at token speed.

    Its store is off, as vLLM's is by default: a background request is refused.
    """
    app = FastAPI()

    async def play() -> AsyncIterator[bytes]:
        for event in recorded_events():
            yield event
            await asyncio.sleep(_SECONDS_PER_TOKEN)

    @app.post("/v1/responses")
    async def create(request: Request) -> Response:
        if (await request.json()).get("background"):
            return Response(_STORE_IS_OFF, 400, media_type="application/json")
        return StreamingResponse(play(), media_type="text/event-stream; charset=utf-8")

    return app
