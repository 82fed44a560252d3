"""What a load is told to do, and what it tells afterwards; both cross a process border as JSON."""

from __future__ import annotations

import msgspec


class Where(msgspec.Struct):
    """Whom to load, and whom to watch meanwhile."""

    port: int
    upstream_port: int
    upstream_pid: int
    server_pids: list[int]
    server_core: int
    load_core: int
    limit_s: float
    background: bool
    """Ask for background responses, which some servers record."""


class Paced(msgspec.Struct, tag=True):
    """Streams on a schedule: ``rate`` events per second each, measured for ``seconds``.

    Then the first bytes of short streams are timed beside them.
    """

    streams: int
    rate: float
    seconds: float
    chat: bool = False


class Burst(msgspec.Struct, tag=True):
    """Streams of ``events`` deltas as fast as they come; measured from end to end."""

    streams: int
    events: int


class Held(msgspec.Struct, tag=True):
    """Streams that are silent after their first events, and end all at once when released."""

    few: int
    many: int
    """Memory is looked at with ``few`` and with ``many`` streams open."""


class LargeEvent(msgspec.Struct, tag=True):
    """Paced streams, and beside them one whose last event has ``large_bytes``."""

    streams: int
    rate: float
    seconds: float
    large_bytes: int


class Requests(msgspec.Struct, tag=True):
    """Small requests on ``connections`` that stay open, each sent when the last was answered."""

    connections: int
    seconds: float


class Replay(msgspec.Struct, tag=True):
    """One background response of ``events``, read again ``reads`` times from the server's copy."""

    events: int
    reads: int


Plan = Paced | Burst | Held | LargeEvent | Requests | Replay


class Order(msgspec.Struct):
    """A load's whole input."""

    where: Where
    plan: Plan


class Costs(msgspec.Struct):
    """What the measured window took, in seconds."""

    window_s: float
    server_cpu_s: float
    upstream_cpu_s: float
    client_cpu_s: float
    server_core_busy_s: float
    load_core_busy_s: float


class Report(msgspec.Struct):
    """A load's whole output.

    ``costs`` and ``work`` (events, or answers) belong to the measured window; ``streams``, ``lost``
    (of what should have come) and ``last_events`` (how streams ended, by name) to the whole run.
    """

    costs: Costs
    work: int
    figures: dict[str, float]
    lost: int = 0
    last_events: dict[str, int] = {}
