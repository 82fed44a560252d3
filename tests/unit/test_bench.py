"""The benchmark's judgements: how a stream ended, what a table says, which target is met."""

from __future__ import annotations

import asyncio
import math

import pytest

from tests.bench.clients import Tally, TimedStream, last_event
from tests.bench.measured import Measured
from tests.bench.plans import Costs, Report
from tests.bench.run import flaws
from tests.bench.scenarios import SCENARIOS
from tests.bench.summary import summarise
from tests.bench.table import Results, digest, median, table
from tests.bench.targets import targets_table
from tests.bench.vllm_events import HEAD, RESPONSE_EVENTS_AROUND, ResponseEvents

PACED = SCENARIOS["paced"]


class NoTransport(asyncio.Transport):
    """A connection that leads nowhere."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send nothing."""

    def close(self) -> None:
        """Close nothing."""


def measured(cpu_s: float, *, lost: int = 0, ending: str = "response.incomplete") -> Measured:
    """Return a round of 1,000 events in one second, all delays 1 ms."""
    costs = Costs(1.0, cpu_s, 0.2, 0.2, cpu_s, 0.4)
    figures = dict.fromkeys(("delay_p50_ms", "delay_p99_ms", "first_byte_p50_ms"), 1.0)
    return Measured(Report(costs, 1000, figures, lost, {ending: 10}), 60.0, 0.1)


def results() -> Results:
    """Return three rounds of nginx and of Lastword, whose medians are 20 and 30 us per event."""
    return {
        "nginx": [measured(cpu, ending="response.completed") for cpu in (0.02, 0.01, 0.09)],
        "lastword": [measured(cpu) for cpu in (0.02, 0.03, 0.04)],
    }


@pytest.mark.parametrize(
    ("body", "whole", "name"),
    [
        (b'event: a\ndata: {"type":"a"}\n\nevent: b\ndata: {"x":1,"type":"b"}\n\n', True, "b"),
        (b'event: b\ndata: {"type": "b"}\n\ndata: [DONE]\n\n', True, "b"),
        (b'event: a\ndata: {"type":"b"}\n\n', True, "a / b"),
        (b'data: {"object":"chat.completion.chunk"}\n\n', True, "chat.completion.chunk"),
        (b'event: b\ndata: {"type":"b"}\n\n', False, "cut b"),
        (b"Bad Gateway", True, "no JSON"),
    ],
)
def test_a_stream_is_named_by_its_last_event(body: bytes, name: str, *, whole: bool) -> None:
    """Half-renamed events and cut streams are not taken for right ones."""
    assert last_event(body, whole=whole) == name


@pytest.mark.parametrize("logprobs_bytes", [0, 3_000_000])
def test_the_upstreams_stream_is_what_it_says(logprobs_bytes: int) -> None:
    """Its pieces are whole HTTP chunks, the last event is vLLM's faulty one, as large as asked."""
    events = ResponseEvents(7, 2, logprobs_bytes)
    wire = events.lead() + events.delta(0, b"1") + events.delta(1, b"2")
    wire += b"".join(events.tail([b"1", b"2"]))
    blocks = []
    while wire:
        size, _, wire = wire.partition(b"\r\n")
        block, wire = wire[: int(size, 16)], wire[int(size, 16) :].removeprefix(b"\r\n")
        blocks.append(block)
    assert blocks.pop() == b""  # the last chunk
    assert len(blocks) == 2 + RESPONSE_EVENTS_AROUND
    assert last_event(blocks[-1], whole=True) == "response.completed"
    assert b'"status":"incomplete"' in blocks[-1]
    assert b'"text":"12"' in blocks[-1]
    assert len(blocks[-1]) >= logprobs_bytes


@pytest.mark.parametrize("size", [1, 7, 100, 100_000])
async def test_events_count_however_they_are_cut(size: int) -> None:
    """The client counts, times and names whole events, wherever the reads end."""
    events = ResponseEvents(7, 2)
    stamps = [b"%019d" % number for number in (1, 2)]
    wire = HEAD + events.lead() + events.delta(0, stamps[0]) + events.delta(1, stamps[1])
    wire += b"".join(events.tail(stamps))
    tally = Tally(1)
    stream = TimedStream(b"", tally)
    stream.connection_made(NoTransport())
    for start in range(0, len(wire), size):
        stream.data_received(wire[start : start + size])
    stream.connection_lost(None)
    assert tally.events == 2 + RESPONSE_EVENTS_AROUND
    assert list(tally.sent) == [1, 2]
    assert tally.last_events == {"response.completed": 1}


def test_the_table_has_medians_and_their_ratios() -> None:
    """The median counts, not the mean; the ratio is one of medians; the spread is told."""
    text = table(PACED, results())
    assert "30.0 (20.0-40.0)" in text
    assert "20.0 (10.0-90.0)" in text
    assert "| Lastword " in text.partition("÷ nginx")[2]
    assert "1.50" in text.partition("÷ nginx")[2]
    assert "30/30" in text
    assert summarise(PACED, results()).servers["lastword"].figures["cpu_us"].ratios == {
        "nginx": pytest.approx(1.5)
    }


def test_the_digest_has_one_row_for_each_scenario() -> None:
    """Its first column's medians, and an empty cell for a server that was not there."""
    text = digest({PACED: results(), SCENARIOS["replay"]: {"recording": results()["lastword"]}})
    _, _, paced, replay = ([*map(str.strip, line.split("|"))] for line in text.splitlines())
    assert paced[1:-1] == [f"{PACED.title}: CPU µs/event", "20.0", "30.0", ""]
    assert replay[2:4] == ["", ""]


def test_a_figure_that_a_round_lacks_has_no_median() -> None:
    """A server that broke off in one round is not judged by the others."""
    rounds = results()["lastword"]
    del rounds[0].report.figures["delay_p50_ms"]
    assert math.isnan(median(rounds, "delay_p50_ms"))


def test_targets_are_judged_where_the_run_tells() -> None:
    """1.5 of nginx's CPU is too much; without Envoy nothing is said of it."""
    lines = targets_table({PACED: results()}).splitlines()
    by_target = {line.split("|")[1].strip(): line for line in lines}
    assert "missed" in by_target["CPU per event ÷ nginx"]
    assert "met" in by_target["peak memory at 200 streams, MB"]
    assert "CPU per event ÷ Envoy + Lua" not in by_target
    assert not targets_table({})


def test_what_is_lost_or_wrong_fails_the_run() -> None:
    """Missing rounds, lost events and uncorrected streams of Lastword count; nginx's are told."""
    good = results()
    assert flaws(PACED, good, 3) == []
    assert len(flaws(PACED, good, 4)) == 1
    lossy = {**good, "lastword": [measured(0.03, lost=1)] * 3}
    assert flaws(PACED, lossy, 3) == ["paced: lastword lost 3"]
    wrong = {**good, "lastword": [measured(0.03, ending="response.completed")] * 3}
    assert flaws(PACED, wrong, 3) == [
        "paced: 30 streams of lastword did not end in response.incomplete"
    ]
    peer = {**good, "nginx": [measured(0.02, lost=5)] * 3}
    assert flaws(PACED, peer, 3) == []
