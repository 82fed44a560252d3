"""An unpatched vLLM's Responses API, with its faults, on top of the scriptable upstream.

It keeps to what FIELD.md (section 1) and the captures say of 0.14 to 0.32: a truncated stream ends
in `response.completed`; a replay ends only there; a cancelled stream and its replays never end;
`starting_after` is an index like any other of Python's.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.captures import load
from tests.fake_scripts import EVENT_STREAM, JSON, response_object, vllm_events

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from tests.fake_vllm import Exchange, FakeVllm
    from tests.waiting import Signal

TRUE = {"true", "1", "on", "yes", "t", "y"}
STORE_OFF = "g1_nostore_background_stream"
STORE_FALSE = "g5_nostore_background_storefalse"


@dataclass
class Run:
    """One response while it is made, and after."""

    response_id: str
    to_come: list[bytes]
    final: dict[str, Any]
    """The response object as it will be."""
    background: bool
    streams: bool
    status: str
    events: list[bytes] = field(default_factory=list)
    allowed: int = 0
    """How many events the test lets it make."""
    fail_after: int | None = None
    """After how many events it fails without a word, as vLLM does."""
    aborted: bool = False
    """Whether generation was given up because the client left or cancelled."""

    @property
    def ended(self) -> bool:
        """Whether the last event was made."""
        return not self.to_come


class FakeResponsesApi:
    """A handler for the fake: POST, GET, cancel, /health and /v1/models as vLLM answers them.

    A response has `tokens` deltas; `max_output_tokens` truncates it. With `gated`, a run makes an
    event only when the test calls `step`. `fail_after` raises vLLM's late error after so many
    events: a cut for a direct stream, silence for a background one.
    """

    def __init__(
        self,
        fake: FakeVllm,
        *,
        store: bool = True,
        gated: bool = False,
        tokens: int = 3,
        api_key: str | None = None,
        fail_after: int | None = None,
    ) -> None:
        self.store = store
        self.gated = gated
        self.tokens = tokens
        self.api_key = api_key
        self.fail_after = fail_after
        self.healthy = True
        self.runs: dict[str, Run] = {}
        self._signal: Signal = fake.signal
        fake.handler = self

    def step(self, response_id: str, events: int = 1) -> None:
        """Let a gated run make some more events."""
        self.runs[response_id].allowed += events
        self._signal.notify()

    def forget(self) -> None:
        """Lose everything, as a restart of vLLM does."""
        self.runs.clear()

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        request = exchange.request
        parts = urlsplit(request.target.decode("latin-1"))
        query = {name: found[-1] for name, found in parse_qs(parts.query).items()}
        path = unquote(parts.path).split("/")[1:]
        if path == ["health"]:
            await exchange.answer(200 if self.healthy else 503, (), b"")
        elif self.api_key and request.values("authorization") != [
            f"Bearer {self.api_key}".encode()
        ]:
            await exchange.answer(401, JSON, b'{"error":"Unauthorized"}')
        elif (request.method, path) == ("GET", ["v1", "models"]):
            await exchange.answer(200, JSON, b'{"object":"list","data":[{"id":"tiny"}]}')
        else:
            await self._route(exchange, path, query)

    async def _route(self, exchange: Exchange, path: list[str], query: dict[str, str]) -> None:
        match exchange.request.method, path:
            case "POST", ["v1", "responses"]:
                await self._create(exchange)
            case "GET", ["v1", "responses", response_id]:
                await self._found(
                    exchange, response_id, lambda run: self._get(exchange, run, query)
                )
            case "POST", ["v1", "responses", response_id, "cancel"]:
                await self._found(exchange, response_id, lambda run: self._cancel(exchange, run))
            case _, ["v1", "responses"] | ["v1", "responses", _]:
                await exchange.answer(405, JSON, b'{"detail":"Method Not Allowed"}')
            case _:
                await exchange.answer(404, JSON, b'{"detail":"Not Found"}')

    async def _create(self, exchange: Exchange) -> None:
        body = json.loads(await exchange.read_body())
        background = _truth(body.get("background"))
        if background and not _truth(body.get("store", True)):
            await exchange.answer(400, JSON, load("0.32.0", STORE_FALSE).body)
            return
        if background and not self.store:
            await exchange.answer(400, JSON, load("0.32.0", STORE_OFF).body)
            return
        run = self._begin(body, background=background)
        if background:
            task = asyncio.create_task(self._generate(run))
            exchange.fake.tasks.add(task)
            task.add_done_callback(exchange.fake.tasks.discard)
        if run.streams:
            await exchange.respond(200, EVENT_STREAM)
            await (self._follow(exchange, run, 0) if background else self._direct(exchange, run))
        elif background:
            await exchange.answer(200, JSON, _object(run))
        else:
            await self._generate(run)
            await exchange.answer(200, JSON, _object(run))

    def _begin(self, body: dict[str, Any], *, background: bool) -> Run:
        limit = body.get("max_output_tokens")
        truncated = limit is not None and limit <= self.tokens
        response_id = body.get("request_id") or f"resp_{len(self.runs) + 1}"
        status = "incomplete" if truncated else "completed"
        events = vllm_events(
            status,
            deltas=min(limit or self.tokens, self.tokens),
            response_id=response_id,
            background=background,
        )
        final = json.loads(events[-1].partition(b"data: ")[2])["response"]
        run = Run(
            response_id,
            events,
            final,
            background,
            streams=_truth(body.get("stream")),
            status="queued" if background else "in_progress",
            fail_after=self.fail_after,
        )
        if self.store or not background:
            self.runs[response_id] = run
        return run

    async def _make(
        self, run: Run, given_up: Callable[[], bool] = lambda: False
    ) -> AsyncGenerator[bytes, None]:
        """Make the events of a run one by one, as far as the test and the faults let it."""

        def may_go_on() -> bool:
            return run.aborted or given_up() or len(run.events) < run.allowed

        while run.to_come:
            if self.gated:
                await self._signal.until(may_go_on)
            if run.aborted or given_up() or len(run.events) == run.fail_after:
                return
            run.events.append(run.to_come.pop(0))
            if run.ended:
                run.status = run.final["status"]
            self._signal.notify()
            yield run.events[-1]
            await asyncio.sleep(0)

    async def _generate(self, run: Run) -> None:
        """Make all events of a run, whoever reads them."""
        async for _ in self._make(run):
            pass

    async def _direct(self, exchange: Exchange, run: Run) -> None:
        """Stream a foreground response; its generation ends when the client leaves."""
        try:
            async with aclosing(self._make(run, lambda: exchange.closed)) as made:
                async for event in made:
                    await exchange.send(event)
        finally:
            run.aborted = not run.ended
        await (exchange.end() if run.ended else exchange.cut())

    async def _get(self, exchange: Exchange, run: Run, query: dict[str, str]) -> None:
        after = query.get("starting_after")
        if after is not None and not after.removeprefix("-").isdigit():
            await _error(exchange, 400, "Input should be a valid integer", "query.starting_after")
        elif query.get("stream", "").lower() not in TRUE:
            await exchange.answer(200, JSON, _object(run))
        else:
            await exchange.respond(200, EVENT_STREAM)
            if run.background and run.streams:
                await self._follow(exchange, run, 0 if after is None else int(after) + 1)
            else:  # vLLM finds no event store for it, after the head was sent
                await exchange.cut()

    async def _follow(self, exchange: Exchange, run: Run, index: int) -> None:
        """Replay from an index, then live; only response.completed ends it."""
        while True:
            while index < len(run.events):
                if index < -len(run.events):  # IndexError in vLLM, after the head was sent
                    await exchange.cut()
                    return
                event = run.events[index]
                await exchange.send(event)
                if event.startswith(b"event: response.completed\n"):
                    await exchange.end()
                    return
                index += 1
            known = len(run.events)
            await self._signal.until(lambda: len(run.events) > known or exchange.closed)  # noqa: B023 -- awaited here
            if exchange.closed:
                return

    async def _cancel(self, exchange: Exchange, run: Run) -> None:
        if not run.background or run.status != "queued":
            await _error(exchange, 400, "Cannot cancel a synchronous response.", "response_id")
            return
        run.aborted = True
        run.status = "cancelled"
        self._signal.notify()
        await exchange.answer(200, JSON, _object(run))

    async def _found(
        self, exchange: Exchange, response_id: str, then: Callable[[Run], Awaitable[None]]
    ) -> None:
        run = self.runs.get(response_id) if self.store else None
        if run is None:
            message = f"Response with id '{response_id}' not found."
            await _error(exchange, 404, message, "response_id")
        else:
            await then(run)


def _truth(value: Any) -> bool:
    """Read a member as vLLM's pydantic reads a boolean."""
    return str(value).lower() in TRUE


def _object(run: Run) -> bytes:
    """Write the response object as vLLM shows it now; a running one says queued."""
    shown = run.final if run.ended else response_object(run.status, run.response_id)
    return json.dumps(shown | {"background": run.background}).encode()


async def _error(exchange: Exchange, code: int, message: str, param: str) -> None:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    await exchange.answer(code, JSON, json.dumps({"error": error}).encode())
