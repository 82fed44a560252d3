"""The command line, as a user calls it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from proxy import cli
from tests.captures import ROOT as CAPTURES
from tests.captures import corrected, load

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Result:
    """How a command ended."""

    returncode: int | str | None
    stdout: bytes
    stderr: bytes


def lastword(*args: str, stdin: bytes = b"") -> Result:
    """Run the command in this process."""
    given = io.TextIOWrapper(io.BytesIO(stdin))
    out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    with (
        mock.patch("sys.argv", ["lastword", *args]),
        mock.patch("sys.stdin", given),
        mock.patch("sys.stdout", out),
        mock.patch("sys.stderr", err),
        pytest.raises(SystemExit) as caught,
    ):
        cli.main()
    told = [stream.buffer for stream in (out, err)]
    assert all(isinstance(buffer, io.BytesIO) for buffer in told)
    stdout, stderr = (buffer.getvalue() for buffer in told if isinstance(buffer, io.BytesIO))
    return Result(caught.value.code or 0, stdout, stderr)


def process(*args: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command as a user does."""
    return subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", "proxy", *args], capture_output=True, check=False
    )


def test_check_config() -> None:
    """Good settings are said to be fine; wrong ones are status 2 and a sentence."""
    good = lastword("serve", "--upstream", "http://127.0.0.1:8000", "--check-config")
    assert (good.returncode, good.stdout) == (0, b"The settings are fine.\n")
    bad = lastword("serve", "--upstream", "x", "--correct", "maybe", "--check-config")
    assert bad.returncode == 2
    assert b"--upstream (LASTWORD_UPSTREAM): must be http://HOST" in bad.stderr
    assert b"--correct (LASTWORD_CORRECT): 'on', 'observe' or 'off'" in bad.stderr
    assert b"Traceback" not in bad.stderr


def test_help_names_every_command() -> None:
    """The help lists the commands, and serve's help lists the settings."""
    assert all(word in lastword("--help").stdout for word in (b"serve", b"fix", b"demo", b"check"))
    assert b"--upstream-idle-s" in lastword("serve", "--help").stdout
    assert lastword("--version").stdout.startswith(b"lastword 0.")


@pytest.mark.parametrize("name", ["a1_stream_truncated", "b1_stream_completed_schema"])
def test_fix_takes_a_capture_with_its_head(name: str) -> None:
    """The head stays, the terminal event is corrected, and what changed is said."""
    path = CAPTURES / "0.32.0" / f"{name}.http"
    capture = load("0.32.0", name)
    head = path.read_bytes().partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    fixed = lastword("fix", str(path))
    body = corrected(capture.body) if capture.is_truncated else capture.body
    assert fixed.returncode == 0
    assert fixed.stdout == head + body
    change = b"response.completed -> response.incomplete" in fixed.stderr
    assert change is capture.is_truncated


def test_fix_takes_chunked_captures_and_bare_streams() -> None:
    """A raw chunked capture leaves its framing; a bare stream comes by stdin."""
    capture = load("0.32.0", "a2_stream_truncated_raw_chunked")
    fixed = lastword("fix", str(CAPTURES / "0.32.0" / "a2_stream_truncated_raw_chunked.http"))
    assert fixed.stdout.endswith(b"\r\n\r\n" + corrected(capture.body))
    assert lastword("fix", stdin=capture.body).stdout == corrected(capture.body)


def test_fix_invents_completes_and_removes_nothing() -> None:
    """A BOM, events after the terminal one and a half event stay."""
    body = b"\xef\xbb\xbf" + load("0.32.0", "b1_stream_completed_schema").body * 2 + b"data: ha"
    assert lastword("fix", stdin=body).stdout == body


def test_fix_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    """An unreadable file is status 2 and a sentence."""
    result = lastword("fix", str(tmp_path / "none"))
    assert result.returncode == 2
    assert b"cannot be read" in result.stderr


def test_check_of_a_server_that_is_not_there() -> None:
    """An address where nobody listens is status 2 and a sentence, and JSON for who asked for it."""
    result = lastword("check", "http://127.0.0.1:1", "--json")
    assert result.returncode == 2
    assert result.stderr.startswith(b"lastword: http://127.0.0.1:1 cannot be asked")
    assert json.loads(result.stdout)["exit_status"] == 2
    wrong = lastword("check", "127.0.0.1:1")
    assert (wrong.returncode, wrong.stdout) == (2, b"")
    assert b"URL must be http" in wrong.stderr


def test_namesake_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the distribution proxy.py, whose package has our name, nothing is started."""
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: {"proxy.py": 1}[name])

    with pytest.raises(SystemExit) as caught:
        cli.main()

    assert caught.value.code == 2
    assert "environment of its own" in capsys.readouterr().err


def test_demo() -> None:
    """The demo shows both endings and says that it plays a recording."""
    result = process("demo")
    assert result.returncode == 0, result.stderr
    assert b"a recording of a real vLLM" in result.stdout
    assert b"response.completed" in result.stdout
    assert b"response.incomplete" in result.stdout
    assert b"The replay of all 12 events equals" in result.stdout
    assert b"\x1b[" not in result.stdout  # plain in a pipe


def test_port_that_is_taken() -> None:
    """A port that cannot be bound is a sentence, not a trace."""
    result = process("serve", "--upstream", "http://127.0.0.1:1", "--host", "192.0.2.1")
    assert result.returncode == 2
    assert b"--port: 192.0.2.1:8080 cannot be bound" in result.stderr
