"""The tools that read what deploy/ holds: those of `make lint-deploy`, or this machine's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

__all__ = ["DEPLOY", "ROOT", "tool"]

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
_FOLDERS = [
    str(ROOT / os.environ.get("VENV_DEPLOY", ".venv-deploy") / "bin"),
    os.environ.get("PATH", ""),
    "/usr/sbin:/usr/local/sbin",
]


def tool(name: str, where: str = "make lint-deploy") -> str:
    """Return the path of a tool; skip the test, saying where it comes from, if there is none."""
    found = shutil.which(name, path=os.pathsep.join(_FOLDERS))
    if found is None:
        pytest.skip(f"{name} is not installed ({where})")
    return found
