"""`lastword check` against a real vLLM: it finds what is wrong, and the proxy to be the cure."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.vllm.conftest import TIME_LIMIT
from tests.vllm.test_vllm_background import wait_until_idle

if TYPE_CHECKING:
    import httpx

    from tests.vllm.conftest import LaunchProxy, Server

pytestmark = TIME_LIMIT

FAULTS_OF_OURS = {
    "truncated",
    "late_error",
    "background_truncated",
    "cursor_beyond",
    "cursor_negative",
    "unstreamed",
    "background_late_error",
}
"""What bare vLLM 0.32.0 has, but for what a cancel shows."""
CANCELLED = {"cancelled_stream", "cancelled_replay"}
"""The tiny model may be done before it is cancelled; then these are told as not asked."""


@dataclass(frozen=True)
class Checked:
    """How the command ended and what it said."""

    status: int
    told: dict[str, Any]

    @property
    def verdicts(self) -> dict[str, str]:
        """The verdict of each question, in what decides."""
        place = "through" if self.told["through"] else "server"
        return {question["id"]: question[place]["verdict"] for question in self.told["questions"]}


def check(server: Server, *options: str) -> Checked:
    """Run the command as an operator does."""
    command = [sys.executable, "-m", "proxy", "check", server.url, "--model", server.model]
    # The waits are long enough for a busy CPU, and most of what is asked answers at once.
    command += ["--api-key", server.api_key, "--timeout-s", "180", "--json", *options]
    done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - our own
    assert done.stdout, done.stderr.decode()
    return Checked(done.returncode, json.loads(done.stdout))


def test_bare_vllm_needs_correcting(vllm: Server, raw: httpx.Client) -> None:
    """The known faults of vLLM 0.32.0 are found, no right thing is, and nothing is left running."""
    checked = check(vllm)
    if not vllm.ours:
        assert checked.status in (0, 1, 3)
        return
    assert checked.status == 1
    assert checked.told["server"]["vllm"].startswith("0.32.0")
    found = {name for name, verdict in checked.verdicts.items() if verdict == "fault"}
    assert found - CANCELLED == FAULTS_OF_OURS | {"usage", "item_status"}
    assert all(checked.verdicts[name] in ("fault", "not_asked") for name in CANCELLED)
    wait_until_idle(raw, vllm)


def test_nothing_is_left_to_correct_through_the_proxy(
    vllm: Server, launch_proxy: LaunchProxy, raw: httpx.Client
) -> None:
    """Through a proxy that makes background responses itself, clients get no such fault."""
    proxy = launch_proxy("--background", "proxy")
    checked = check(vllm, "--through", proxy.url)
    asked = {name for name, verdict in checked.verdicts.items() if verdict != "not_asked"}
    assert checked.told["through"]["to_correct"] == []
    assert set(checked.verdicts) - asked <= CANCELLED
    assert checked.status == (0 if asked == set(checked.verdicts) else 3)
    assert checked.told["through"]["stored"] == 0
    wait_until_idle(raw, vllm)
