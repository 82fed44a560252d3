"""The benchmark: in each scenario the servers by turns, round after round, and a table of medians.

`python -m tests.bench.run [--scenario NAME,...] [--only SERVER,...] [--json FILE]`, and `--help`.
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

from tests.bench.machine import facts
from tests.bench.measured import CORRECTED, Measured
from tests.bench.plans import Order, Report, Where
from tests.bench.processes import StartError, family, peak_rss_mb, pinned
from tests.bench.scenarios import QUICK, SCENARIOS, Scenario
from tests.bench.servers import SERVERS, Server
from tests.bench.summary import Summary, summarise
from tests.bench.table import Results, digest, table
from tests.bench.targets import targets_table

_LIMIT_S: Final = 40.0  # of one load


class _Bench:
    """One scenario: the upstream that its rounds share, and the cores that everything runs on."""

    def __init__(self, scenario: Scenario, options: argparse.Namespace, folder: Path) -> None:
        self._scenario = scenario
        self._options = options
        self._folder = folder
        cores = sorted(os.sched_getaffinity(0))
        self._load_core, self._server_core = cores[0], cores[-1]

    def run(self, servers: list[Server]) -> Results:
        """Measure every server once per round; none is always the first after another."""
        results: Results = {server.name: [] for server in servers}
        command = [sys.executable, "-m", "tests.bench.upstream"]
        log = self._folder / "upstream.log"
        with pinned(command, core=self._load_core, log=log, stdout=subprocess.PIPE) as upstream:
            said = upstream.stdout.readline() if upstream.stdout else b""
            if not said:
                raise StartError(log.read_text()[-1000:])
            for number in range(self._options.rounds):
                turn = servers if number % 2 == 0 else [servers[0], *reversed(servers[1:])]
                for server in turn:
                    measured = self._measure(server, upstream.pid, int(said))
                    if measured is not None:
                        results[server.name].append(measured)
        return results

    def _measure(self, server: Server, upstream_pid: int, upstream: int) -> Measured | None:
        folder = Path(tempfile.mkdtemp(prefix=f"{server.name}-", dir=self._folder))
        try:
            with server.start(upstream, self._server_core, folder) as running:
                where = Where(
                    port=running.port,
                    upstream_port=upstream,
                    upstream_pid=upstream_pid,
                    server_pids=family(running.pid) if running.pid else [],
                    server_core=self._server_core,
                    load_core=self._load_core,
                    limit_s=_LIMIT_S,
                    background=server.records,
                )
                report = self._load(where)
                measured = Measured(report, peak_rss_mb(where.server_pids), os.getloadavg()[0])
        except (StartError, OSError, subprocess.SubprocessError) as error:
            _say(f"FAILED {server.name}: {error}")
            return None
        _say(f"  {server.name}: {measured.line()}")
        return measured

    def _load(self, where: Where) -> Report:
        order = Order(where, self._scenario.plan(self._options.seconds))
        command = [sys.executable, "-m", "tests.bench.load", msgspec.json.encode(order).decode()]
        log = self._folder / "load.log"
        with pinned(command, core=self._load_core, log=log, stdout=subprocess.PIPE) as client:
            output, _ = client.communicate(timeout=_LIMIT_S + 10)
        if client.returncode:
            raise StartError(log.read_text()[-1000:])
        return msgspec.json.decode(output, type=Report)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.run", description=__doc__)
    parser.add_argument("--scenario", help=f"some of {','.join(SCENARIOS)}; default all")
    parser.add_argument("--only", help=f"servers, some of {','.join(SERVERS)}; default all")
    parser.add_argument("--quick", action="store_true", help="one small scenario, in a minute")
    parser.add_argument("--rounds", type=int, help="default 5")
    parser.add_argument("--seconds", type=float, help="measured in each round; default 3")
    parser.add_argument(
        "--realtime", action="store_true", help="step before other processes (root): a busy machine"
    )
    parser.add_argument("--limit-s", type=int, default=1800, help="the whole run's end, at latest")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("build/bench.json"),
        help="file for all figures of all rounds; default %(default)s",
    )
    options = parser.parse_args()
    options.scenario = _chosen(parser, "--scenario", options.scenario, list(SCENARIOS))
    options.only = _chosen(parser, "--only", options.only, list(SERVERS))
    options.rounds = options.rounds or (3 if options.quick else 5)
    options.seconds = options.seconds or (1.5 if options.quick else 3.0)
    return options


def _chosen(
    parser: argparse.ArgumentParser, option: str, given: str | None, known: list[str]
) -> list[str]:
    chosen = given.split(",") if given else known
    if unknown := set(chosen) - set(known):
        parser.error(f"{option} knows {','.join(known)}, not {','.join(sorted(unknown))}")
    return chosen


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _present(options: argparse.Namespace, scenarios: list[Scenario]) -> dict[str, Server]:
    """Return the servers that can be measured here, and name those that cannot."""
    needed = {name for scenario in scenarios for name in scenario.servers}
    present = {}
    for name in options.only:
        if name not in needed:
            continue
        if lacks := SERVERS[name].lacks():
            _say(f"SKIPPED {name}: {lacks}")
        else:
            present[name] = SERVERS[name]
    return present


def flaws(scenario: Scenario, results: Results, rounds: int) -> list[str]:
    """Return what makes a run a failed one: rounds that are missing, events lost, wrong endings."""
    found = []
    for name, all_rounds in results.items():
        if not SERVERS[name].must_hold:
            continue
        if len(all_rounds) != rounds:
            found.append(f"{scenario.name}: {name} failed {rounds - len(all_rounds)} times")
        if lost := sum(abs(measured.report.lost) for measured in all_rounds):
            found.append(f"{scenario.name}: {name} lost {lost}")
        ending = CORRECTED if SERVERS[name].corrects else "response.completed"
        wrong = sum(
            measured.streams - measured.report.last_events.get(ending, 0) for measured in all_rounds
        )
        if scenario.corrects and wrong:
            found.append(f"{scenario.name}: {wrong} streams of {name} did not end in {ending}")
    return found


def main() -> int:
    """Measure, print, and write the figures down; 1 if anything was lost or failed."""
    options = _options()
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda *_: sys.exit(1))  # so that every child is stopped
    signal.alarm(options.limit_s)
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    scenarios = [QUICK] if options.quick else [SCENARIOS[name] for name in options.scenario]
    present = _present(options, scenarios)
    kept = Summary(facts())
    _say(", ".join(f"{name}: {value}" for name, value in kept.machine.items()))
    if len(os.sched_getaffinity(0)) == 1:
        _say("NOTE: one core only: server, upstream and client share it.")
    runs: dict[Scenario, Results] = {}
    found: list[str] = []
    for scenario in scenarios:
        servers = [present[name] for name in scenario.servers if name in present]
        if not servers:
            continue
        _say(f"\n### {scenario.title}\n")
        with tempfile.TemporaryDirectory(prefix="lastword-bench-") as folder:
            results = _Bench(scenario, options, Path(folder)).run(servers)
        _say("\n" + table(scenario, results))
        runs[scenario] = results
        found += flaws(scenario, results, options.rounds)
        kept.scenarios[scenario.name] = summarise(scenario, results)
        # After each, so that a run that is stopped tells something.
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1))
    _say(f"\n### All\n\n{digest(runs)}\n\n{targets_table(runs)}")
    for flaw in found:
        _say(f"FAILED {flaw}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
