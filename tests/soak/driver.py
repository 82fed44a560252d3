"""One soak from start to end: upstream, proxy, clients, samples, and the verdict."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from tests.e2e.wire import exchange
from tests.fake_vllm import FakeVllm
from tests.soak.clients import Client
from tests.soak.plan import HEARTBEAT_S
from tests.soak.process import ProxyProcess, Sample, running_proxy
from tests.soak.starvation import Starvation
from tests.soak.tally import Tally
from tests.soak.upstream import SoakUpstream

if TYPE_CHECKING:
    from collections.abc import Callable

SETTINGS: Final = {
    "heartbeat_s": HEARTBEAT_S,
    "stall_check_s": 0.5,
    "upstream_keepalive_s": 1,
    "write_stall_s": 20,
    "copy_ttl_s": 15,
    "tombstone_ttl_s": 15,
    "store": "memory:",
    "ready_needs_upstream": False,
}
"""Small times, so that a short soak sees every timer, and copies that go again; nobody asks for
/health, whose connection would be left open behind the streams."""
LAST_STREAMS_S: Final = 60.0
"""How long the last streams may take to end."""
QUIET_LIMIT_S: Final = 20.0
JUDGED_FROM_S: Final = 120.0
"""A shorter soak tells nothing about memory."""
WARM_UP: Final = 3 / 8
"""Of the time."""
GROWTH_ALLOWED: Final = 0.1
SET_ASIDE_ALLOWED: Final = 0.05
"""Share of the streams."""


@dataclass(frozen=True)
class Options:
    """How long, how many streams at a time, from which seed."""

    seconds: float
    streams: int
    seed: int = 1
    sample_s: float = 5.0
    pace: float = 1.0
    """How long the pauses of upstream and clients are; smaller is faster."""
    idle_s: float = 6.0
    """The proxy's upstream_idle_s; far above every pause of a stream that goes on."""


@dataclass
class Report:
    """What was seen; ``flaws`` is empty if everything was as it must be."""

    options: Options
    tally: Tally
    starvation: Starvation = field(default_factory=Starvation)
    upstream_requests: int = 0
    samples: list[Sample] = field(default_factory=list)
    before: Sample | None = None
    after: Sample | None = None
    log_lines: Counter[tuple[str, str]] = field(default_factory=Counter)
    exit_status: int | None = None
    active: str = ""
    flaws: list[str] = field(default_factory=list)

    @property
    def too_busy(self) -> bool:
        """Whether so many streams were set aside that the rest proves nothing."""
        return len(self.tally.set_aside) > self.tally.streams * SET_ASIDE_ALLOWED

    @property
    def warm_mb(self) -> float:
        """RSS at the end of the warm-up: the median around it.

        Runs are made by upstream in the first quarter and by the proxy in the second, and the
        allocator has kept room for both kinds' largest events only when both have been going on.
        """
        end = self.options.seconds * WARM_UP
        wide = self.options.seconds / 8
        return median(
            [sample.rss_mb for sample in self.samples if abs(sample.at_s - end) <= wide]
            or [self.samples[-1].rss_mb]
        )

    @property
    def late(self) -> list[float]:
        """RSS in the second half, sample by sample."""
        half = self.options.seconds / 2
        return [sample.rss_mb for sample in self.samples if sample.at_s >= half]


async def soak(options: Options, say: Callable[[str], None] = lambda text: None) -> Report:
    """Run a soak, which ends by itself, and judge it."""
    tally = Tally()
    report = Report(options, tally)
    with tempfile.TemporaryDirectory(prefix="lastword-soak-") as folder:
        async with FakeVllm() as fake:
            upstream = SoakUpstream(fake, options.pace)
            log = Path(folder) / "proxy.log"
            settings = SETTINGS | {"upstream_idle_s": options.idle_s}
            async with running_proxy(fake.port, log, settings) as proxy:
                report.before = proxy.sample(0)
                await _load(report, fake, upstream, proxy, say=say)
                await _quiet(fake, proxy, report)
                told = await exchange(proxy.admin_url, "POST", "/drain", body=b"")
                report.active = told.body.decode()
                report.exit_status = await proxy.terminate()
                report.log_lines = proxy.log_counts()
                report.flaws += [
                    f"logged: {line}"
                    for line in proxy.log()
                    if line["level"] in ("error", "critical")
                ]
            report.upstream_requests = upstream.requests
            report.flaws += [f"upstream's script: {failure!r}" for failure in fake.failures]
            fake.failures.clear()
    _judge(report)
    return report


async def _load(
    report: Report,
    fake: FakeVllm,
    upstream: SoakUpstream,
    proxy: ProxyProcess,
    *,
    say: Callable[[str], None],
) -> None:
    """Let the clients work for the time, sampling; then let the last streams end."""
    options, loop = report.options, asyncio.get_running_loop()
    start = loop.time()
    stop = asyncio.Event()
    clients = [
        Client(
            proxy.url,
            upstream,
            report.tally,
            report.starvation,
            name=f"{options.seed}-{number}",
            pace=options.pace,
        )
        for number in range(options.streams)
    ]
    tasks = [asyncio.create_task(client.run(stop)) for client in clients]
    tasks.append(asyncio.create_task(report.starvation.watch()))
    told = 0
    try:
        while (elapsed := loop.time() - start) < options.seconds:
            upstream.store = int(4 * elapsed / options.seconds) % 2 == 0
            await asyncio.sleep(min(options.sample_s, options.seconds - elapsed))
            sample = proxy.sample(loop.time() - start)
            report.samples.append(sample)
            fake.exchanges.clear()
            say("\n".join([*report.tally.flaws[told:], _line(sample, report.tally)]))
            told = len(report.tally.flaws)
            if proxy.process.returncode is not None:
                break
        stop.set()
        async with asyncio.timeout(LAST_STREAMS_S):
            await asyncio.gather(*tasks[:-1])
    except TimeoutError:
        report.flaws.append(
            f"streams that do not end: {sum(not task.done() for task in tasks[:-1])}"
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _quiet(fake: FakeVllm, proxy: ProxyProcess, report: Report) -> None:
    """Wait until nothing is left open, at most so long; what is left then is judged."""
    loop = asyncio.get_running_loop()
    end = loop.time() + QUIET_LIMIT_S
    while True:
        report.after = sample = proxy.sample(0)
        left = sample.clients or sample.upstreams or fake.open or fake.tasks
        if (not left and report.before and sample.fds <= report.before.fds) or loop.time() > end:
            break
        await asyncio.sleep(0.2)
    if fake.tasks:
        report.flaws.append(f"requests that upstream still answers: {len(fake.tasks)}")


def _judge(report: Report) -> None:
    """Say what is not as it must be."""
    flaws, before, after = report.flaws, report.before, report.after
    flaws += report.tally.flaws
    if before is None or after is None:
        raise RuntimeError("the soak was not run to its end")
    if after.clients or after.upstreams:
        flaws.append(f"connections left: {after.clients} clients, {after.upstreams} upstream")
    if after.fds > before.fds:
        flaws.append(f"files left open: {after.fds}, {before.fds} at the start")
    if report.active != '{"drained":true,"active":0}':
        flaws.append(f"drain: {report.active}")
    if report.exit_status != 0:
        flaws.append(f"exit status {report.exit_status}")
    if not report.tally.streams:
        flaws.append("no stream was judged")
    limit_mb = report.warm_mb * (1 + GROWTH_ALLOWED)
    if report.options.seconds >= JUDGED_FROM_S and median(report.late) > limit_mb:
        flaws.append(
            f"memory grows: {report.warm_mb:.1f} MB warm, {median(report.late):.1f} MB later"
        )


def _line(sample: Sample, tally: Tally) -> str:
    return (
        f"{sample.at_s:6.1f} s  RSS {sample.rss_mb:6.1f} MB  {sample.fds:4} fds"
        f"  {sample.threads:2} threads  {sample.clients:3} clients  {sample.upstreams:3} upstream"
        f"  {tally.streams:6} streams  {tally.events:7} events  {len(tally.flaws)} flaws"
    )
