"""The unit, read by systemd's own tools, and its settings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.settings import accepted, last_seconds
from tests.deploy.tools import DEPLOY, tool

UNIT = (DEPLOY / "systemd" / "lastword.service").read_text()
COMMAND = "/opt/lastword/bin/lastword"


def directive(name: str) -> str:
    """Return the value of a directive that stands once."""
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    assert isinstance(value, str)
    return value


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """Give the unit with the command of this environment, for systemd looks whether it is there."""
    path = tmp_path / "lastword.service"
    path.write_text(UNIT.replace(COMMAND, str(Path(sys.executable).with_name("lastword"))))
    return path


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze, which needs no running systemd for this."""
    return subprocess.run(  # noqa: S603 - our own file
        [tool("systemd-analyze", "systemd 250 or newer"), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_unit_is_understood(unit: Path) -> None:
    """Systemd knows every directive, and finds every command."""
    done = analyze("verify", str(unit))
    assert (done.returncode, done.stderr) == (0, "")


def test_unit_is_hardened(unit: Path) -> None:
    """Systemd's own measure of what a service may do, from 0 to 10, is 2 or less."""
    done = analyze("security", "--offline=yes", "--threshold=20", str(unit))
    assert done.returncode == 0, done.stdout[-200:]


def test_settings_are_settings() -> None:
    """What the environment file sets is accepted, and lies in the folder that the unit makes."""
    lines = (DEPLOY / "systemd" / "lastword.env").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if line and line[0] != "#")
    settings = accepted(given)
    assert given["LASTWORD_STORE"].startswith(f"sqlite:/var/lib/{directive('StateDirectory')}/")
    assert float(directive("TimeoutStopSec")) >= last_seconds(settings)
    assert directive("ExecStart") == f"{COMMAND} serve"
