"""Run the tests of a module on the loops that it names."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

import pytest
import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable

_FACTORIES = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def on_loops(*names: Literal["asyncio", "uvloop"]) -> Callable[[pytest.Metafunc], None]:
    """Return a module's ``pytest_generate_tests`` that runs every test on each of these loops.

    The fixture is pytest-asyncio's own; its public hook for this can only stand in a conftest and
    would then hold for every module.
    """

    def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
        metafunc.fixturenames.append("_asyncio_loop_factory")
        metafunc.parametrize(
            "_asyncio_loop_factory",
            [pytest.param(_FACTORIES[name], id=name) for name in names],
            indirect=True,
        )

    return pytest_generate_tests
