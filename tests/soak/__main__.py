"""A soak of the real proxy: `python -m tests.soak --seconds 600 --streams 100`, and `--help`.

It ends by itself, uses 127.0.0.1 alone, prints a summary, and exits with 1 if anything was wrong or
the machine too busy to tell.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from tests.soak.driver import Options, soak
from tests.soak.table import table


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Read the options, soak, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="default 600")
    parser.add_argument("--streams", type=int, default=100, help="at a time; default 100")
    parser.add_argument("--seed", type=int, default=1, help="of everything random; default 1")
    parser.add_argument("--sample-s", type=float, default=5, help="between samples; default 5")
    given = parser.parse_args()
    options = Options(given.seconds, given.streams, given.seed, given.sample_s)
    report = asyncio.run(soak(options, _say))
    _say("\n" + table(report))
    return int(bool(report.flaws) or report.too_busy)


if __name__ == "__main__":
    sys.exit(main())
