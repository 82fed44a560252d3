"""Read what a running proxy tells at /metrics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.wire import exchange
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["families", "outcomes", "total", "until_outcomes", "until_total"]


async def families(admin_url: str) -> list[Metric]:
    """Scrape the admin port as Prometheus does."""
    answer = await exchange(admin_url, "GET", "/metrics")
    assert answer.status == 200
    return list(text_string_to_metric_families(answer.body.decode()))


async def total(admin_url: str, name: str, **labels: str) -> float:
    """Return the sum of all series of this name that have these labels."""
    found = [
        sample.value
        for family in await families(admin_url)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found, f"no metric {name} with {labels}"
    return sum(found)


async def until_total(admin_url: str, expected: float, name: str, **labels: str) -> None:
    """Wait until the sum is what is expected: a client sees its end a moment before the count."""
    async with asyncio.timeout(PATIENCE_S):
        while await total(admin_url, name, **labels) != expected:
            pass


async def outcomes(admin_url: str) -> dict[str, float]:
    """Return how many streams have ended how, without those that are none."""
    return {
        sample.labels["outcome"]: sample.value
        for family in await families(admin_url)
        for sample in family.samples
        if sample.name == "lastword_streams_total" and sample.value
    }


async def until_outcomes(admin_url: str, **expected: int) -> None:
    """Wait until so many streams have ended so, and no others."""
    async with asyncio.timeout(PATIENCE_S):
        while await outcomes(admin_url) != expected:
            pass
