"""Imports point inward."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "proxy"
STANDARD = sys.stdlib_module_names
# What each room may import of this project, and of others where that is limited.
ROOMS: dict[str, set[str]] = {
    "core": {"core"},
    "upstream": {"core", "upstream", "settings", "errors"},
    "store": {"core", "store", "settings", "errors", "addresses"},
    "background": {"core", "upstream", "store", "background", "settings", "errors"},
    "gateway": {"core", "upstream", "store", "background", "gateway", "settings", "errors"},
    "operations": {
        *("core", "upstream", "store", "background", "gateway", "operations"),
        *("settings", "errors", "__version__"),
    },
}
COMPOSITION_ROOT = ROOT / "gateway" / "app.py"
FORBIDDEN_IN_CORE = {"asyncio", "socket", "ssl", "threading", "selectors", "http", "urllib"}


def imports(path: Path) -> set[str]:
    """The modules that a file imports, with those for type checking."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative imports hide the room"
            found.add(node.module)
    return found


def rooms_of(path: Path) -> set[str]:
    """The rooms of this project that a file imports."""
    return {
        name.split(".")[1] if "." in name else "__version__"
        for name in imports(path)
        if name == "proxy" or name.startswith("proxy.")
    }


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_imports_point_inward(room: str) -> None:
    """A room imports only the rooms inside it; the composition root puts all of them together."""
    for path in (ROOT / room).rglob("*.py"):
        if path != COMPOSITION_ROOT:
            assert rooms_of(path) <= ROOMS[room], path.name


def test_core_has_no_io_and_one_dependency() -> None:
    """The core stands on the standard library and msgspec, and does neither I/O nor async."""
    for path in (ROOT / "core").rglob("*.py"):
        tops = {name.split(".")[0] for name in imports(path)} - {"proxy"}
        assert tops - STANDARD <= {"msgspec"}, path.name
        assert not tops & FORBIDDEN_IN_CORE, path.name
        tree = ast.parse(path.read_text())
        assert not any(isinstance(n, ast.AsyncFunctionDef | ast.Await) for n in ast.walk(tree))


@pytest.mark.parametrize("module", ["settings", "errors", "addresses"])
def test_modules_that_all_may_know(module: str) -> None:
    """Settings, their addresses and errors know nobody but the core's words."""
    assert rooms_of(ROOT / f"{module}.py") <= {"core", "errors", "addresses"}


def test_middleware_knows_the_core_alone() -> None:
    """It loads inside vLLM: the core, the standard library, prometheus-client where it is."""
    path = ROOT / "middleware.py"
    assert rooms_of(path) == {"core"}
    tops = {name.split(".")[0] for name in imports(path)} - {"proxy"}
    assert tops - STANDARD == {"prometheus_client"}
