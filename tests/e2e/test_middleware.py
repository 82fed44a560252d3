"""The middleware around a FastAPI application, on a real uvicorn: the bytes that clients get."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
import uvicorn
from fastapi import BackgroundTasks, FastAPI
from fastapi.responses import StreamingResponse
from starlette.middleware.base import BaseHTTPMiddleware

from proxy.middleware import Lastword
from tests.captures import corrected, load
from tests.e2e.wire import STREAM, connect
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

CAPTURE = load("0.32.0", "a1_stream_truncated")
CREATED, DELTA = CAPTURE.events[0], CAPTURE.events[4]
README = Path(__file__).parents[2] / "README.md"
ENDED = b"The server ended the stream before the response was finished."
RAISED = b"The server failed before the response was finished; its log says why."


def example() -> FastAPI:
    """Make the application that the README shows."""
    _, before, rest = README.read_text().partition("```python\nfrom fastapi import FastAPI\n")
    code, fence, _ = rest.partition("```\n")
    assert before
    assert fence
    names: dict[str, Any] = {}
    exec("from fastapi import FastAPI\n" + code, names)  # noqa: S102 - the README's own
    app = names["app"]
    assert isinstance(app, FastAPI)
    return app


class Server(uvicorn.Server):
    """A uvicorn that leaves the signals to pytest."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Serve an application as vLLM does, by uvicorn; gives its URL."""
    config = uvicorn.Config(app, port=0, log_config=None, ws="none", timeout_graceful_shutdown=5)
    server = Server(config)
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(PATIENCE_S):
        while not server.started:
            assert not task.done()
            await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


def application(
    *chunks: bytes, error: Exception | None = None, ran: list[str] | None = None
) -> FastAPI:
    """Make an application that streams these chunks, and may fail behind them."""
    app = FastAPI()

    @app.post("/v1/responses")
    async def create(tasks: BackgroundTasks) -> StreamingResponse:
        async def events() -> AsyncIterator[bytes]:
            for chunk in chunks:
                yield chunk
            if error is not None:
                raise error

        if ran is not None:
            tasks.add_task(ran.append, "background task")
        return StreamingResponse(events(), media_type="text/event-stream", background=tasks)

    return app


async def post(app: Any) -> Any:
    """Ask for a stream and read the answer to its end, whichever."""
    async with serving(app) as url, connect(url) as wire:
        await wire.post(STREAM)
        return await wire.answer()


async def test_example_of_the_readme() -> None:
    """The README's application, as it stands there, corrects its stream for openai-python."""
    async with (
        asyncio.timeout(PATIENCE_S),
        serving(example()) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client,
    ):
        stream = await client.responses.create(model="tiny", input="moby", stream=True)
        assert [event.type async for event in stream] == [
            "response.created",
            "response.incomplete",
        ]


@pytest.mark.parametrize("wrap", ["added", "around"])
async def test_truncated_stream(wrap: str) -> None:
    """Added to the application or put around it: every event in an HTTP chunk, the end clean."""
    app = application(*CAPTURE.events)
    if wrap == "added":
        app.add_middleware(Lastword)
    answer = await post(app if wrap == "added" else Lastword(app))
    assert answer.status == 200
    assert answer.ending == "clean"
    assert answer.body == corrected(CAPTURE.body)
    assert len(answer.chunks) == len(CAPTURE.events)


@pytest.mark.parametrize(
    ("setting", "told", "ending"),
    [("failed_cut", True, "cut"), ("failed", True, "clean"), ("abort", False, "cut")],
)
@pytest.mark.parametrize("raises", [True, False], ids=["raises", "ends early"])
async def test_stream_that_the_application_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    setting: str,
    ending: str,
    *,
    told: bool,
    raises: bool,
) -> None:
    """The client sees ``response.failed`` and the end that was asked for; the log says why."""
    monkeypatch.setenv("LASTWORD_ON_LOST_UPSTREAM", setting)
    ran: list[str] = []
    app = application(CREATED, DELTA, error=ZeroDivisionError() if raises else None, ran=ran)
    app.add_middleware(Lastword)
    answer = await post(app)
    assert answer.ending == ending
    assert answer.body.startswith(CREATED + DELTA)
    failure = answer.body.removeprefix(CREATED + DELTA)
    if told:
        assert failure.startswith(b"event: response.failed\n")
        assert b'"message":"%b"' % (RAISED if raises else ENDED) in failure
    else:
        assert failure == b""
    assert ran == ([] if raises else ["background task"])
    logged = [record for record in caplog.records if record.levelno >= logging.WARNING]
    if raises or ending == "cut":
        assert [record.getMessage() for record in logged] == ["Exception in ASGI application\n"]
        assert logged[0].exc_info
        assert logged[0].exc_info[0] is not None
        name = "ZeroDivisionError" if raises else "UnfinishedStreamError"
        assert logged[0].exc_info[0].__name__ == name
    else:
        assert logged[0].getMessage().startswith(ENDED.decode())


async def test_cut_that_starlettes_middleware_would_hide() -> None:
    """Starlette's wrapper ends a broken body cleanly; around it, the middleware cuts all the same.

    (Inside of it nobody can cut: so Lastword is to be the outermost.)
    """

    class Inner(BaseHTTPMiddleware):
        async def dispatch(self, request: Any, call_next: Any) -> Any:
            return await call_next(request)

    broken = application(CREATED, DELTA, error=ZeroDivisionError())
    bare = await post(Inner(broken))
    assert (bare.body, bare.ending) == (CREATED + DELTA, "clean")
    answer = await post(Lastword(Inner(broken)))
    assert answer.body.removeprefix(CREATED + DELTA).startswith(b"event: response.failed\n")
    assert answer.ending == "cut"


async def test_connection_serves_on_after_a_clean_end() -> None:
    """A corrected stream leaves its connection as any other does."""
    app = application(*CAPTURE.events)
    app.add_middleware(Lastword)
    async with serving(app) as url, connect(url) as wire:
        for _ in range(2):
            await wire.post(STREAM)
            answer = await wire.answer()
            assert answer.body == corrected(CAPTURE.body)


async def test_client_that_leaves_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """The application is stopped as without the middleware, and nothing is logged."""
    stopped = asyncio.Event()
    app = FastAPI()

    @app.post("/v1/responses")
    async def create() -> StreamingResponse:
        async def events() -> AsyncIterator[bytes]:
            try:
                yield CREATED
                while True:
                    yield DELTA
                    await asyncio.sleep(0.001)
            finally:
                stopped.set()

        return StreamingResponse(events(), media_type="text/event-stream")

    app.add_middleware(Lastword)
    async with serving(app) as url:
        async with connect(url) as wire:
            await wire.post(STREAM)
            await wire.head()
            assert await wire.chunk() == CREATED
        async with asyncio.timeout(PATIENCE_S):
            await stopped.wait()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
