"""The clients of the soak: each follows its streams in a manner of its own and judges them."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from random import Random
from typing import TYPE_CHECKING, Final, Literal

from tests.e2e.wire import RESPONSES, Answer, Cut, Wire, connect
from tests.soak.plan import DONE, Expected, Fault, Plan, failure_flaw

if TYPE_CHECKING:
    from tests.soak.starvation import Starvation
    from tests.soak.tally import Tally
    from tests.soak.upstream import SoakUpstream

Manner = Literal["reads", "reads slowly", "leaves", "breaks off", "leaves before the head", "stops"]
MANNERS: Final[dict[Manner, int]] = {
    "reads": 60,
    "reads slowly": 12,
    "leaves": 10,
    "breaks off": 8,
    "leaves before the head": 4,
    "stops": 2,
}
SMALL_BUFFER: Final = 4096
CANCELLED: Final = {"code": "cancelled", "message": "The response was cancelled."}
HARMLESS: Final = {Fault.COMPLETE, Fault.TRUNCATED, Fault.SLOW, Fault.HUGE}


class WrongError(Exception):
    """The client got something else than the rules say."""


MISSES = (WrongError, Cut, TimeoutError, OSError, ValueError, AssertionError)


class Client:
    """Asks one stream after another until it is told to stop."""

    def __init__(
        self,
        url: str,
        upstream: SoakUpstream,
        tally: Tally,
        starvation: Starvation,
        *,
        name: str,
        pace: float,
    ) -> None:
        self._starvation = starvation
        self._url = url
        self._pace = pace
        self._upstream = upstream
        self._tally = tally
        self._name = name
        self._rng = Random(name)
        self._asked = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Go on until told to stop; the last stream is read as any other."""
        await self._pause(1)  # not all in step
        while not stop.is_set():
            self._asked += 1
            background = self._rng.random() < 0.35
            key = f"{'run' if background else 'direct'}-{self._name}-{self._asked}"
            plan = Plan.of(key, background=background)
            start = asyncio.get_running_loop().time()
            try:
                await (self._run(plan) if background else self._direct(plan))
            except MISSES as error:
                self._flaw(plan, f"{type(error).__name__} {error}", start)
            finally:
                self._upstream.forget(key)

    async def _pause(self, longest_s: float) -> None:
        await asyncio.sleep(self._rng.uniform(0, longest_s) * self._pace)

    def _flaw(self, plan: Plan, what: str, start: float) -> None:
        starved = self._starvation.since(start)
        (self._tally.set_aside if starved else self._tally.flaws).append(
            f"{plan.key} ({plan.fault.value}, {plan.sent} of {len(plan.events)} events): {what}"
        )

    # Direct streams.

    async def _direct(self, plan: Plan) -> None:
        rng = self._rng
        manner = rng.choices(list(MANNERS), list(MANNERS.values()))[0]
        off = plan.fault in HARMLESS and rng.random() < 0.1
        body = {"model": "tiny", "input": "moby", "stream": True, "request_id": plan.key}
        headers = [("Lastword-Correct", rng.choice(("off", "observe")))] if off else []
        expected = Expected(200, b"".join(plan.events)) if off else plan.expected()
        small = SMALL_BUFFER if manner in ("reads slowly", "stops") else None
        async with connect(self._url, receive_buffer=small) as wire:
            await wire.post(json.dumps(body).encode(), headers)
            if manner == "leaves before the head":
                await self._pause(0.1)
                wire.leave()
                self._tally.count(plan, manner)
                return
            answer = await wire.head()
            if manner == "stops":
                await self._pause(3)
                self._tally.count(plan, manner)
                return
            if answer.status == 200 and manner in ("leaves", "breaks off"):
                limit = rng.randint(0, plan.sent)
                if not await self._read(wire, answer, limit):
                    wire.leave() if manner == "leaves" else wire.reset()
                    _check_part(expected, answer)
                    self._tally.count(plan, "left")
                    return
            else:
                await self._read(wire, answer, None, slow=manner == "reads slowly")
        self._check(plan, expected, answer)
        self._tally.count(plan, _outcome(expected))

    async def _read(
        self, wire: Wire, answer: Answer, limit: int | None, *, slow: bool = False
    ) -> bool:
        """Read to the end, or until so many chunks have come; say whether it was the end."""
        if answer.values("transfer-encoding") != [b"chunked"]:
            await wire.body(answer)
            return True
        try:
            while limit is None or len(answer.chunks) < limit:
                if slow:
                    await self._pause(0.2)
                if not (chunk := await wire.chunk()):
                    return True
                if kept := self._tally.read(chunk):
                    answer.chunks.append(kept)
        except Cut as cut:
            answer.ending = cut.args[0]
            return True
        return False

    def _check(self, plan: Plan, expected: Expected, answer: Answer) -> None:
        """Check what a client got that stayed to the end."""
        body = answer.body
        if answer.status != expected.status:
            raise WrongError(f"status {answer.status}, wanted {expected.status}: {body!r}")
        if expected.status == 502:
            if not json.loads(body)["error"]["message"]:
                raise WrongError(f"an error without a message: {body!r}")
            return
        if plan.fault is Fault.TALKATIVE:
            body = body.removesuffix(DONE)
        if not body.startswith(expected.body):
            raise WrongError(f"{body!r} does not begin with {expected.body!r}")
        rest = body[len(expected.body) :]
        if expected.failed is not None:
            flaw = failure_flaw(plan, rest, expected.number, expected.failed)
            if flaw is not None:
                raise WrongError(flaw)
        elif rest:
            raise WrongError(f"more than was sent: {rest!r}")
        if answer.ending != expected.ending:
            raise WrongError(f"ended {answer.ending}, wanted {expected.ending}")

    # Runs.

    async def _run(self, plan: Plan) -> None:
        """Create a run, read it in parts, cancel it or not, then read it again."""
        rng = self._rng
        cancel_after = rng.randint(1, len(plan.events)) if rng.random() < 0.15 else None
        asked = {
            "model": "tiny",
            "input": "moby",
            "stream": True,
            "background": True,
            "request_id": plan.key,
        }
        got = Answer(200, "", [])
        cancelled = False
        ended = False
        first = True
        while not ended:
            async with AsyncExitStack() as stack:
                slow = rng.random() < 0.1
                small = SMALL_BUFFER if slow else None
                wire = await stack.enter_async_context(connect(self._url, receive_buffer=small))
                if first:
                    await wire.post(json.dumps(asked).encode())
                else:
                    await wire.request("GET", _replay(plan.key, after=_events(got) - 1))
                part = await wire.head()
                if first and part.status != 200:
                    await wire.body(part)
                    expected = plan.expected(in_proxy=self._upstream.in_proxy.get(plan.key, False))
                    self._check(plan, expected, part)
                    self._tally.count(plan, _outcome(expected))
                    return
                if part.status != 200:
                    await wire.body(part)
                    raise WrongError(f"resuming: {part.status} {part.body!r}")
                first = False
                limit = rng.randint(1, 40) if rng.random() < 0.4 else None
                if cancel_after is not None and not cancelled:
                    limit = max(1, cancel_after - _events(got))
                ended = await self._read(wire, part, limit, slow=slow)
                got.chunks += part.chunks
                got.ending = part.ending
                if cancel_after is not None and not cancelled and _events(got) >= 1:
                    cancelled = await self._cancel(plan)
                    cancel_after = None
                elif not ended:
                    (wire.leave if rng.random() < 0.5 else wire.reset)()
                    await self._pause(0.5)
        expected = plan.expected(in_proxy=self._upstream.in_proxy[plan.key])
        if cancelled:
            number = _events(got) - 1
            body = plan.whole[: len(b"".join(plan.events[:number]))]
            expected = Expected(200, body, CANCELLED, number)
        self._check(plan, expected, got)
        await self._read_again(plan, got.body)
        self._tally.count(plan, "cancelled" if cancelled else _outcome(expected))

    async def _cancel(self, plan: Plan) -> bool:
        """Cancel a run; False if it had ended already."""
        async with connect(self._url) as wire:
            await wire.request("POST", f"{RESPONSES}/{plan.key}/cancel", body=b"")
            answer = await wire.answer()
        told = answer.json()
        if answer.status == 400 and told["error"]["message"].startswith("Cannot cancel a"):
            return False
        if answer.status != 200 or told["status"] != "cancelled":
            raise WrongError(f"cancel: {answer.status} {answer.body!r}")
        return True

    async def _read_again(self, plan: Plan, body: bytes) -> None:
        """Replay an ended run, whole and from a cursor; delete it, or leave it to expire."""
        rng = self._rng
        events = body.split(b"\n\n")[:-1]
        cursor = rng.randint(-1, len(events) + 2)
        wanted = b"".join(event + b"\n\n" for event in events[cursor + 1 :])
        async with connect(self._url) as wire:
            for after, part in ((-1, body), (cursor, wanted)):
                await wire.request("GET", _replay(plan.key, after=after))
                answer = await wire.head()
                await self._read(wire, answer, None)
                if (answer.status, answer.body, answer.ending) != (200, part, "clean"):
                    raise WrongError(f"replay after {after}: {answer}")
            if rng.random() < 0.3:
                target = f"{RESPONSES}/{plan.key}"
                for method, status in (("DELETE", 200), ("GET", 404)):
                    await wire.request(method, target)
                    answer = await wire.answer()
                    if answer.status != status:
                        raise WrongError(f"{method}: {answer}")


def _check_part(expected: Expected, answer: Answer) -> None:
    """Check what a client got that did not stay to the end."""
    got, whole = answer.body, expected.body
    if got[: len(whole)] != whole[: len(got)]:
        raise WrongError(f"not the bytes that were sent: {got!r}")


def _replay(key: str, *, after: int) -> str:
    query = "?stream=true" + ("" if after < 0 else f"&starting_after={after}")
    return f"{RESPONSES}/{key}{query}"


def _events(answer: Answer) -> int:
    return answer.body.count(b"\n\n")


def _outcome(expected: Expected) -> str:
    if expected.status != 200:
        return str(expected.status)
    if expected.failed is None:
        return "whole" if expected.ending == "clean" else "cut"
    return "failed" if expected.ending == "clean" else "failed + cut"
