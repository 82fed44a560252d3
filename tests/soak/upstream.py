"""The upstream of the soak: the scriptable fake, behaving as each request's plan says."""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

from tests.captures import load
from tests.fake_responses_api import STORE_OFF
from tests.fake_scripts import EVENT_STREAM, JSON, response_object
from tests.soak.plan import BROKEN, DONE, STARVED_S, Fault, Plan

if TYPE_CHECKING:
    from tests.fake_vllm import Exchange, FakeVllm

GZIPPED: Final = (*EVENT_STREAM, ("content-encoding", "gzip"))
NO_DEFLATE: Final = b"\xff" * 16
SETTLE_S: Final = STARVED_S
"""What came before gets a moment: resets and garbage in gzip destroy what was not read yet."""


class SoakUpstream:
    """A handler for the fake; with ``store`` off it refuses background, and the proxy makes runs.

    ``in_proxy`` tells of every run who makes it; its judge takes it out.  ``pace`` stretches or
    shortens all pauses.
    """

    def __init__(self, fake: FakeVllm, pace: float) -> None:
        self._pace = pace
        self.store = True
        self.in_proxy: dict[str, bool] = {}
        self.cancelled: set[str] = set()
        self.requests = 0
        fake.handler = self

    def forget(self, key: str) -> None:
        """Forget a run."""
        self.in_proxy.pop(key, None)
        self.cancelled.discard(key)

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        self.requests += 1
        path, _, query = exchange.request.target.decode().partition("?")
        match exchange.request.method, path.split("/")[1:]:
            case "GET", ["health"]:
                await exchange.answer(200)
            case "POST", ["v1", "responses"]:
                await self._create(exchange)
            case "GET", ["v1", "responses", key] if "stream" in query:
                await self._replay(exchange, key, _after(query))
            case "GET", ["v1", "responses", key] if key in self.in_proxy:
                status = "cancelled" if key in self.cancelled else "queued"
                await exchange.answer(200, JSON, json.dumps(response_object(status, key)).encode())
            case "POST", ["v1", "responses", key, "cancel"]:
                self.cancelled.add(key)
                told = response_object("cancelled", key, background=True)
                await exchange.answer(200, JSON, json.dumps(told).encode())
            case _:
                await exchange.answer(404, JSON, b'{"error":{"message":"not found"}}')

    async def _create(self, exchange: Exchange) -> None:
        asked = json.loads(await exchange.read_body())
        key: str = asked["request_id"]
        run = key.startswith("run")
        background = asked.get("background", False)
        if background and not self.store:
            await exchange.answer(400, JSON, load("0.32.0", STORE_OFF).body)
            return
        if run:
            self.in_proxy[key] = not background
        plan = Plan.of(key, background=run, in_proxy=not background)
        match plan.fault:
            case Fault.BEFORE_HEAD:
                await asyncio.sleep(plan.pause_s * self._pace)
                await exchange.cut()
            case Fault.LATE_500:
                await asyncio.sleep(plan.pause_s * self._pace)
                await exchange.answer(500, JSON, BROKEN)
            case Fault.GZIP | Fault.GZIP_GARBAGE:
                await exchange.respond(200, GZIPPED)
                await self._send_gzip(exchange, plan)
            case _:
                await exchange.respond(200, EVENT_STREAM)
                await self._send(exchange, plan)

    async def _send(self, exchange: Exchange, plan: Plan) -> None:
        for piece, pause_s in zip(plan.pieces, plan.pauses(), strict=True):
            await asyncio.sleep(pause_s * self._pace)
            if plan.key in self.cancelled:  # vLLM lets the stream of a cancelled run hang
                await exchange.wait_closed()
                return
            await exchange.send(piece)
        match plan.fault:
            case Fault.CUT:
                await exchange.cut()
            case Fault.RESET:
                await asyncio.sleep(SETTLE_S)
                if not exchange.closed:  # the proxy may have hung up by now
                    await exchange.reset()
            case Fault.GARBAGE:
                await exchange.send_raw(b"no chunk\r\n\r\n")
                await exchange.cut()
            case Fault.STALL | Fault.HANG_AFTER:
                await exchange.wait_closed()
            case Fault.TALKATIVE:
                await exchange.send(DONE + plan.events[4])
                await exchange.end()
            case Fault.ERROR:
                await exchange.send(plan.error_event())
                await exchange.end()
            case _:
                await exchange.end()

    async def _send_gzip(self, exchange: Exchange, plan: Plan) -> None:
        packer = zlib.compressobj(wbits=31)
        for piece, pause_s in zip(plan.pieces, plan.pauses(), strict=True):
            await asyncio.sleep(pause_s * self._pace)
            if plan.key in self.cancelled:
                await exchange.wait_closed()
                return
            await exchange.send(packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH))
        if plan.fault is Fault.GZIP_GARBAGE:
            await asyncio.sleep(SETTLE_S)
            await exchange.send(NO_DEFLATE)
        else:
            await exchange.send(packer.flush())
        await exchange.end()

    async def _replay(self, exchange: Exchange, key: str, after: int) -> None:
        """Send what comes behind a number, as vLLM does for a run that it still has."""
        plan = Plan.of(key, background=True)
        stalls = plan.fault is Fault.STALL
        await exchange.respond(200, EVENT_STREAM)
        for event in plan.events[after + 1 : plan.sent if stalls else None]:
            await asyncio.sleep(plan.pause_s * self._pace)
            if key in self.cancelled:
                await exchange.wait_closed()
                return
            await exchange.send(event)
        await (exchange.wait_closed() if stalls else exchange.end())


def _after(query: str) -> int:
    return int(parse_qs(query).get("starting_after", ["-1"])[-1])
