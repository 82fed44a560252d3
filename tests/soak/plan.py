"""What upstream does with one request of the soak, and what the client must get of it.

Both sides draw a plan from the request's key alone, so neither has to tell the other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Final

from tests.captures import corrected
from tests.fake_scripts import cut, event, response_object, vllm_events

if TYPE_CHECKING:
    from tests.e2e.wire import Ending

HEARTBEAT_S: Final = 0.3
"""Of the proxy; below the longest pause of a slow stream, so that heartbeats pass."""
STARVED_S: Final = 0.5
"""Who wakes so much later than it asked to had no processor: no time can be judged then."""
HEARTBEAT: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
BROKEN: Final = b'{"error":{"message":"boom","type":"internal_error","param":null,"code":500}}'
ERROR: Final = {"code": "engine_dead", "message": "The engine is dead."}
SLOW_S: Final = 0.5


class Fault(StrEnum):
    """How upstream behaves."""

    COMPLETE = "complete"
    TRUNCATED = "truncated"
    FAILED = "says completed, is failed"
    SLOW = "slow"
    HUGE = "huge event"
    GZIP = "gzip"
    TALKATIVE = "goes on after the terminal event"
    HANG_AFTER = "hangs after the terminal event"
    HALF_TERMINAL = "terminal event without blank line"
    CUT = "cut"
    RESET = "reset"
    EOF = "end without terminal event"
    GARBAGE = "garbage in the framing"
    GZIP_GARBAGE = "garbage in gzip"
    STALL = "stall"
    ERROR = "error event, then the end"
    LATE_500 = "late 500"
    BEFORE_HEAD = "cut before the head"


LOSES = {
    Fault.CUT,
    Fault.RESET,
    Fault.EOF,
    Fault.GARBAGE,
    Fault.GZIP_GARBAGE,
    Fault.STALL,
    Fault.ERROR,
}
"""Upstream does not end its stream."""
DIRECT_ONLY = {Fault.TALKATIVE, Fault.ERROR}
WEIGHTS: Final = {
    Fault.COMPLETE: 18,
    Fault.TRUNCATED: 20,
    Fault.SLOW: 6,
    Fault.GZIP: 6,
    Fault.HUGE: 2,
    Fault.STALL: 3,
}
"""Of 100 or so; a fault that is not here has 4."""


@dataclass(frozen=True)
class Expected:
    """What a client gets: a status and bytes, without heartbeats; then a failure, or none."""

    status: int
    body: bytes
    failed: dict[str, str] | None = None
    """The error of the ``response.failed`` that the proxy adds."""
    number: int = 0
    """The sequence number of that event."""
    ending: Ending = "clean"


@dataclass(frozen=True)
class Plan:
    """One request's plan; ``background`` says whether it makes a run."""

    key: str
    background: bool
    fault: Fault
    events: list[bytes]
    """Everything that upstream would send, uncorrected."""
    sent: int
    """How many of the events it does send."""
    half: bytes
    """What it sends of the next one."""
    pause_s: float
    by_events: bool
    """Whether it sends an event at a time, or whatever bytes."""

    @classmethod
    def of(cls, key: str, *, background: bool, in_proxy: bool = False) -> Plan:
        """Draw the plan of a key; ``in_proxy``: the events as vLLM's, which knows of no run."""
        rng = Random(key)
        faults = [fault for fault in Fault if not (background and fault in DIRECT_ONLY)]
        fault = rng.choices(faults, [WEIGHTS.get(fault, 4) for fault in faults])[0]
        status = {Fault.COMPLETE: "completed", Fault.FAILED: "failed"}.get(fault, "incomplete")
        events = vllm_events(
            status,
            deltas=rng.randint(3, 40),
            response_id=key,
            background=background and not in_proxy,
            padding=rng.randint(100_000, 1_500_000) if fault is Fault.HUGE else 0,
        )
        sent = len(events)
        half = b""
        if fault is Fault.ERROR:
            sent = rng.randrange(1, len(events))
        elif fault in LOSES:
            sent = rng.randrange(len(events))
            if rng.random() < 0.5:
                half = events[sent][: rng.randint(1, len(events[sent]) - 3)]
        elif fault is Fault.HALF_TERMINAL:
            sent -= 1
            half = events[sent][: -rng.randint(1, 2)]
        pause_s = rng.choice((0, 0.02, 0.1, 0.2))
        return cls(key, background, fault, events, sent, half, pause_s, rng.random() < 0.7)

    @cached_property
    def pieces(self) -> list[bytes]:
        """What upstream sends before the fault, in the pieces in which it sends it."""
        parts = [*self.events[: self.sent], *([self.half] if self.half else [])]
        if self.by_events:
            return parts
        rng = Random(f"{self.key} cuts")
        data = b"".join(parts)
        return cut(data, sorted(rng.randrange(len(data) + 1) for _ in parts)) if data else []

    def pauses(self) -> list[float]:
        """How long upstream waits before each piece."""
        rng = Random(f"{self.key} pauses")
        longest = SLOW_S if self.fault is Fault.SLOW else 2 * self.pause_s
        pauses = [rng.uniform(0, longest) for _ in self.pieces]
        if self.fault is Fault.SLOW:  # a few long ones are enough
            pauses = [pause if number < 12 else 0.01 for number, pause in enumerate(pauses)]
        return pauses

    @property
    def whole(self) -> bytes:
        """The stream as a client must see it that gets all of it."""
        body = b"".join(self.events)
        names = {Fault.COMPLETE: "", Fault.FAILED: "response.failed"}
        name = names.get(self.fault, "response.incomplete")
        return corrected(body, name) if name else body

    def error_event(self) -> bytes:
        """Write the event that upstream sends before it gives up."""
        return event("error", self.sent, code=ERROR["code"], message=ERROR["message"])

    def expected(self, *, in_proxy: bool = False) -> Expected:
        """Say what the client of a direct stream gets, or the followers of a run.

        A run that vLLM makes is taken up again where its stream is lost, unless it is silent.
        """
        if self.fault is Fault.LATE_500:
            return Expected(500, BROKEN)
        if self.fault is Fault.BEFORE_HEAD:
            return Expected(502, b"")
        if self.fault not in LOSES:
            return Expected(200, self.whole)
        if not self.sent:  # no response was created that could fail
            return Expected(502, b"") if self.background else Expected(200, b"", ending="cut")
        if self.background and not in_proxy and self.fault is not Fault.STALL:
            return Expected(200, self.whole)
        body = b"".join(self.events[: self.sent])
        failed = {"code": "server_error"}
        number = self.sent
        if self.fault is Fault.ERROR:
            body += self.error_event()
            failed, number = ERROR, number + 1
        return Expected(200, body, failed, number, "clean" if self.background else "cut")


def failure_flaw(plan: Plan, block: bytes, number: int, error: dict[str, str]) -> str | None:
    """Say what is wrong with the ``response.failed`` that the proxy wrote; None if nothing is."""
    lines = block.split(b"\n")
    if len(lines) != 4 or lines[0] != b"event: response.failed" or lines[2:] != [b"", b""]:
        return f"no single response.failed: {block[:200]!r}"
    payload = json.loads(lines[1].removeprefix(b"data: "))
    told = payload["response"]["error"]
    status = "cancelled" if error["code"] == "cancelled" else "failed"
    wanted = response_object(status, plan.key, background=plan.background, error=told)
    if payload != {"response": wanted, "sequence_number": number, "type": "response.failed"}:
        return f"a wrong response.failed, number {number} wanted: {block!r}"
    if not told["message"] or any(told[name] != value for name, value in error.items()):
        return f"a wrong error: {told}"
    return None
