"""The benchmark: the servers by turns, round after round, and a table of their medians.

`python -m tests.bench.run [--quick] [--burst] [--only NAME,...] [--json FILE]`, and `--help`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from tests.bench.load import Plan, Report
from tests.bench.processes import StartError, family, peak_rss_mb, pinned
from tests.bench.servers import SERVERS, Server
from tests.bench.table import Measured, table

_STREAMS: Final = 200
_RATE: Final = 50.0
_BURST_STREAMS: Final = 50
_BURST_EVENTS: Final = 1000
_LIMIT_S: Final = 60.0  # of one load


class _Bench:
    """The upstream that all rounds share, and the cores that everything runs on."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        cores = sorted(os.sched_getaffinity(0))
        self._load_core, self._server_core = cores[0], cores[-1]
        if len(cores) == 1:
            _say("WARNING: one core only: server, upstream and client share it.")

    def run(self, servers: list[Server]) -> dict[str, list[Measured]]:
        """Measure every server once per round; none is always the first after another."""
        results: dict[str, list[Measured]] = {server.name: [] for server in servers}
        command = [sys.executable, "-m", "tests.bench.upstream"]
        log = self._folder / "upstream.log"
        with pinned(command, core=self._load_core, log=log, stdout=subprocess.PIPE) as upstream:
            said = upstream.stdout.readline() if upstream.stdout else b""
            if not said:
                raise StartError(log.read_text()[-1000:])
            port = int(said)
            for number in range(self._options.rounds):
                turn = servers if number % 2 == 0 else [servers[0], *reversed(servers[1:])]
                for server in turn:
                    measured = self._measure(server, upstream.pid, port)
                    if measured is not None:
                        results[server.name].append(measured)
        return results

    def _measure(self, server: Server, upstream_pid: int, upstream: int) -> Measured | None:
        folder = Path(tempfile.mkdtemp(prefix=f"{server.name}-", dir=self._folder))
        try:
            with server.start(upstream, self._server_core, folder) as running:
                pids = family(running.pid) if running.pid else []
                report = self._load(running.port, pids, upstream_pid)
                measured = Measured(report, peak_rss_mb(pids), os.getloadavg()[0])
        except (StartError, subprocess.SubprocessError) as error:
            _say(f"FAILED {server.name}: {error}")
            return None
        _say(f"  {server.name}: {measured.line()}")
        return measured

    def _load(self, port: int, pids: list[int], upstream_pid: int) -> Report:
        burst = self._options.burst
        plan = Plan(
            port=port,
            streams=_BURST_STREAMS if burst else _STREAMS,
            rate=0.0 if burst else _RATE,
            seconds=self._options.seconds,
            limit_s=_LIMIT_S,
            server_pids=pids,
            upstream_pid=upstream_pid,
            server_core=self._server_core,
            load_core=self._load_core,
            events=_BURST_EVENTS,
        )
        command = [sys.executable, "-m", "tests.bench.load", msgspec.json.encode(plan).decode()]
        log = self._folder / "load.log"
        with pinned(command, core=self._load_core, log=log, stdout=subprocess.PIPE) as client:
            output, _ = client.communicate(timeout=_LIMIT_S + 10)
        if client.returncode:
            raise StartError(log.read_text()[-1000:])
        return msgspec.json.decode(output, type=Report)


def _options() -> argparse.Namespace:
    names = ",".join(server.name for server in SERVERS)
    parser = argparse.ArgumentParser(prog="python -m tests.bench.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 rounds of 2 s: under a minute")
    parser.add_argument("--burst", action="store_true", help="50 streams x 1,000, not paced")
    parser.add_argument("--only", default=names, help=f"servers to measure (default {names})")
    parser.add_argument("--rounds", type=int, help="default 5")
    parser.add_argument("--seconds", type=float, help="measured in each round; default 4")
    parser.add_argument(
        "--realtime", action="store_true", help="step before other processes (root): a busy machine"
    )
    parser.add_argument("--limit-s", type=int, default=900, help="the whole run's end, at latest")
    parser.add_argument("--json", type=Path, help="file for all figures of all rounds")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - set(names.split(",")):
        parser.error(f"--only knows {names}, not {', '.join(sorted(unknown))}")
    options.rounds = options.rounds or (3 if options.quick else 5)
    options.seconds = options.seconds or (2.0 if options.quick else 4.0)
    return options


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Measure, print, and write the figures down; 1 if anything was lost or failed."""
    options = _options()
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda *_: sys.exit(1))  # so that every child is stopped
    signal.alarm(options.limit_s)
    servers: list[Server] = []
    for server in SERVERS:
        if server.name not in options.only.split(","):
            continue
        if lacks := server.lacks():
            _say(f"SKIPPED {server.name}: {lacks}")
        else:
            servers.append(server)
    scenario = (
        f"{_BURST_STREAMS} streams of {_BURST_EVENTS} events at once"
        if options.burst
        else f"{_STREAMS} streams x {_RATE:g} events/s, {options.seconds:g} s"
    )
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    _say(f"{scenario}, {options.rounds} rounds; load average {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory(prefix="lastword-bench-") as folder:
        results = _Bench(options, Path(folder)).run(servers)
    _say("\n" + table(results))
    if options.json is not None:
        kept = {"scenario": scenario, "results": results}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1))
    complete = all(len(rounds) == options.rounds for rounds in results.values())
    lost = any(measured.report.lost for rounds in results.values() for measured in rounds)
    return int(lost or not complete)


if __name__ == "__main__":
    sys.exit(main())
