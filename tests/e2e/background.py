"""What the tests of background responses say and expect, in whichever mode."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.captures import corrected
from tests.e2e.wire import RESPONSES, Answer, Cut, Wire, connect, exchange
from tests.fake_responses_api import FakeResponsesApi
from tests.fake_scripts import vllm_events
from tests.prometheus import total

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.e2e.wire import Ending
    from tests.fake_vllm import FakeVllm

MODES = ("upstream", "proxy")
"""Who makes the response. What the client gets must be the same bytes."""
ALICE = (("Authorization", "Bearer alice"),)
BOB = (("Authorization", "Bearer bob"),)

Headers = tuple[tuple[str, str], ...]


def asked(**members: Any) -> bytes:
    """Write a create request; a streaming one unless it says otherwise."""
    told = {"model": "tiny", "input": "moby", "stream": True, "background": True} | members
    return json.dumps({name: value for name, value in told.items() if value is not None}).encode()


def expected(status: str = "completed", **kind: Any) -> list[bytes]:
    """List the events that a client must get of a stream of the fake's."""
    events = vllm_events(status, background=True, **kind)
    if status != "completed":
        events[-1] = corrected(events[-1])
    return events


def blocks(body: bytes) -> list[bytes]:
    """Split a body into its events; the last one must be whole."""
    assert body == b"" or body.endswith(b"\n\n")
    return [block + b"\n\n" for block in body.split(b"\n\n")[:-1]]


def payload(block: bytes) -> Any:
    """Decode an event's data."""
    return json.loads(block.partition(b"data: ")[2])


def kind(block: bytes) -> tuple[str, str, int]:
    """Say what a terminal event is: its name, the response's status, its number."""
    name = block.partition(b"\n")[0].removeprefix(b"event: ").decode()
    told = payload(block)
    assert told["type"] == name
    return name, told["response"]["status"], told["sequence_number"]


async def create(url: str, headers: Headers = (), **members: Any) -> Answer:
    """Create a background response and read the whole answer."""
    head = [("Content-Type", "application/json"), *headers]
    return await exchange(url, "POST", RESPONSES, head, asked(**members))


async def get(
    url: str, query: str = "", headers: Headers = (), *, response_id: str = "resp_1"
) -> Answer:
    """GET a response; ``query`` comes without its question mark."""
    target = f"{RESPONSES}/{response_id}" + (f"?{query}" if query else "")
    return await exchange(url, "GET", target, headers)


async def replay(
    url: str, after: int | None = None, headers: Headers = (), *, response_id: str = "resp_1"
) -> Answer:
    """GET a response's stream, from a cursor on."""
    query = "stream=true" + ("" if after is None else f"&starting_after={after}")
    return await get(url, query, headers, response_id=response_id)


async def cancel(url: str, headers: Headers = (), *, response_id: str = "resp_1") -> Answer:
    """POST a cancel, as openai-python does: without a body."""
    return await exchange(url, "POST", f"{RESPONSES}/{response_id}/cancel", headers)


async def delete(url: str, headers: Headers = (), *, response_id: str = "resp_1") -> Answer:
    """DELETE a response."""
    return await exchange(url, "DELETE", f"{RESPONSES}/{response_id}", headers)


def refusal(answer: Answer) -> tuple[int, str | None, str]:
    """Say what an error is: status, param, message."""
    error = answer.json()["error"]
    return answer.status, error["param"], error["message"]


class Follower:
    """A client that follows a stream, event by event, however they were put into chunks."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.data = b""
        self.ending: Ending | None = None

    @property
    def events(self) -> list[bytes]:
        """The events so far."""
        return blocks(self.data)

    async def read(self, count: int) -> list[bytes]:
        """Read on until there are so many events; return all."""
        while self.data.count(b"\n\n") < count:
            chunk = await self.wire.chunk()
            assert chunk, f"ended after {len(self.events)} events"
            self.data += chunk
        return self.events

    async def rest(self) -> list[bytes]:
        """Read to the end; return all events."""
        try:
            while chunk := await self.wire.chunk():
                self.data += chunk
            self.ending = "clean"
        except Cut as cut:
            self.ending = cut.args[0]
        return self.events


@asynccontextmanager
async def creating(
    url: str,
    headers: Headers = (),
    *,
    gated: FakeVllm | None = None,
    receive_buffer: int | None = None,
    **members: Any,
) -> AsyncIterator[Follower]:
    """Create a background stream and follow it; a gated run is let go as far as its first event."""
    async with connect(url, receive_buffer=receive_buffer) as wire:
        known = len(api_of(gated).runs) if gated else 0
        await wire.post(asked(**members), headers)
        if gated:
            api = api_of(gated)
            await gated.until(lambda: len(api.runs) > known)
            api.step(list(api.runs)[-1])
        head = await wire.head()
        assert head.status == 200, head
        yield Follower(wire)


def api_of(fake: FakeVllm) -> FakeResponsesApi:
    """Give the Responses API that answers for the fake."""
    assert isinstance(fake.handler, FakeResponsesApi)
    return fake.handler


@asynccontextmanager
async def following(
    url: str,
    after: int | None = None,
    headers: Headers = (),
    *,
    response_id: str = "resp_1",
    receive_buffer: int | None = None,
) -> AsyncIterator[Follower]:
    """Follow a response from a cursor on."""
    query = "?stream=true" + ("" if after is None else f"&starting_after={after}")
    async with connect(url, receive_buffer=receive_buffer) as wire:
        await wire.request("GET", f"{RESPONSES}/{response_id}{query}", list(headers))
        head = await wire.head()
        assert head.status == 200, head
        yield Follower(wire)


async def metric(admin_url: str, name: str) -> float:
    """Read a counter, whatever its labels."""
    return await total(admin_url, name)
