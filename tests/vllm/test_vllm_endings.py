"""Every stream of a real vLLM ends properly: it fails inside, its engine dies, the proxy goes down.

A direct stream ends with `response.failed` and is then cut, so that a client that overlooks the
event fails all the same; a follower of a background response gets a clean end.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.vllm.conftest import TIME_LIMIT, ProxyProcess, Server, openai_client
from tests.vllm.test_vllm_background import (
    BEGINNING,
    LONG,
    assert_failed,
    wait_until_idle,
)
from tests.vllm.test_vllm_responses import TRUNCATED, is_terminal, response_id, retrieve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx
    from openai.types.responses import ResponseStreamEvent

    from proxy.tools.vllm_process import VllmProcess
    from tests.vllm.conftest import LaunchProxy

pytestmark = TIME_LIMIT

STALL_CHECK_S = 1.0
UPSTREAM_DOWN_S = 10.0  # a vLLM that is only slow for some seconds is not down


@dataclass(frozen=True)
class Ended:
    """What a client got, and the error that it ended with."""

    events: list[ResponseStreamEvent]
    error: Exception | None

    @property
    def cut(self) -> bool:
        """Whether the connection was cut, rather than silent for too long."""
        return type(self.error) is openai.APIConnectionError


@dataclass(frozen=True)
class Killed:
    """How two streams ended whose engine was killed, and the replay of the background one."""

    direct: Ended
    background: Ended
    replay: list[ResponseStreamEvent]
    status: str | None


@pytest.fixture(
    params=[
        pytest.param({"logit_bias": {"999999": 1}}, id="logit_bias out of vocabulary"),
        pytest.param({"structured_outputs": {"regex": "("}}, id="bad regex"),
    ]
)
def failing(request: pytest.FixtureRequest, bare: openai.OpenAI, vllm: Server) -> dict[str, Any]:
    """Give a request that bare vLLM begins to answer and then cuts, without a word."""
    asked = TRUNCATED | {"extra_body": request.param}
    try:
        ended = ask(bare, vllm, asked)
    except openai.APIStatusError as error:
        assert not vllm.ours
        pytest.skip(f"this vLLM refuses the request at once: {error}")
    if any(is_terminal(event) for event in ended.events):
        assert not vllm.ours
        pytest.skip("this vLLM answers the request to its end")
    assert ended.events
    assert ended.cut
    return asked


@pytest.fixture(scope="module")
def killed(mortal_vllm: VllmProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    """Kill the engine in the middle of a direct stream and of a background one; give both."""
    server = Server(mortal_vllm.url, mortal_vllm.model, "none", ours=True)
    log = tmp_path_factory.mktemp("killed") / "proxy.log"
    options = ["--background", "upstream", "--stall-check-s", f"{STALL_CHECK_S}"]
    options += ["--upstream-down-s", f"{UPSTREAM_DOWN_S}"]
    with (
        ProxyProcess(server.url, log, *options) as proxy,
        openai_client(proxy.url, server) as client,
        client.responses.create(
            model=server.model, stream=True, background=True, **LONG
        ) as background,
        client.responses.create(model=server.model, stream=True, **LONG) as direct,
    ):
        followed = list(islice(background, BEGINNING))
        seen = list(islice(direct, BEGINNING))
        os.kill(mortal_vllm.engine_pids()[0], signal.SIGKILL)
        direct_end = read_on(direct, seen)
        background_end = read_on(background, followed)
        yield Killed(
            direct_end,
            background_end,
            retrieve(client, followed),
            client.responses.retrieve(response_id(followed)).status,
        )


def test_stream_that_vllm_cuts_ends_with_failed(
    client: openai.OpenAI, vllm: Server, failing: dict[str, Any]
) -> None:
    """Where bare vLLM cuts, `response.failed` comes first; then the cut, and the client raises."""
    ended = ask(client, vllm, failing)
    assert_failed(ended.events)
    assert ended.cut


def test_stream_that_vllm_cuts_can_end_cleanly(
    launch_proxy: LaunchProxy, vllm: Server, failing: dict[str, Any]
) -> None:
    """With `--on-lost-upstream failed` the body ends cleanly after `response.failed`."""
    proxy = launch_proxy("--on-lost-upstream", "failed")
    with openai_client(proxy.url, vllm) as client:
        ended = ask(client, vllm, failing)
    assert_failed(ended.events)
    assert ended.error is None


def test_stream_that_vllm_cuts_can_be_cut_alone(
    launch_proxy: LaunchProxy, vllm: Server, failing: dict[str, Any]
) -> None:
    """With `--on-lost-upstream abort` the client gets what vLLM sent, and the cut."""
    proxy = launch_proxy("--on-lost-upstream", "abort")
    with openai_client(proxy.url, vllm) as client:
        ended = ask(client, vllm, failing)
    assert ended.events
    assert not any(is_terminal(event) for event in ended.events)
    assert ended.cut


def test_killed_engine_ends_a_direct_stream_with_failed(killed: Killed) -> None:
    """An engine killed in mid-stream: the answer so far, `response.failed`, the cut, at once."""
    assert_failed(killed.direct.events)
    assert killed.direct.cut


def test_killed_engine_ends_a_background_response_with_failed(killed: Killed) -> None:
    """Made by vLLM, whose stream may hang for ever: it ends once vLLM has been down for long.

    The follower gets a clean end, the replay is the stream, and GET says failed.
    """
    assert_failed(killed.background.events)
    assert killed.background.error is None
    assert killed.replay == killed.background.events
    assert killed.status == "failed"


def test_terminated_proxy_ends_a_direct_stream_with_failed(
    launch_proxy: LaunchProxy, raw: httpx.Client, vllm: Server
) -> None:
    """After SIGTERM and its grace the stream ends, saying why; vLLM stops; exit status 0."""
    proxy = launch_proxy("--shutdown-grace-s", "0.5")
    with openai_client(proxy.url, vllm) as client:
        events = client.responses.create(model=vllm.model, stream=True, **LONG)
        with events:
            seen = list(islice(events, BEGINNING))
            proxy.terminate()
            ended = read_on(events, seen)
    assert proxy.wait() == 0
    assert_failed(ended.events, saying="shutting down")
    assert ended.cut
    wait_until_idle(raw, vllm)


def test_terminated_proxy_lets_a_stream_finish_within_its_grace(
    launch_proxy: LaunchProxy, vllm: Server
) -> None:
    """A stream that ends within `shutdown_grace_s` ends as if nothing had happened."""
    proxy = launch_proxy("--shutdown-grace-s", "60")
    asked = LONG | {"max_output_tokens": 100}
    with openai_client(proxy.url, vllm) as client:
        events = client.responses.create(model=vllm.model, stream=True, **asked)
        with events:
            seen = list(islice(events, BEGINNING))
            proxy.terminate()
            ended = read_on(events, seen)
    assert proxy.wait() == 0
    assert ended.error is None
    assert ended.events[-1].type in {"response.incomplete", "response.completed"}


def test_terminated_proxy_ends_a_response_that_it_makes(
    launch_proxy: LaunchProxy, raw: httpx.Client, vllm: Server, tmp_path: Path
) -> None:
    """Its follower gets `response.failed` and a clean end; so it is in the store afterwards."""
    options = ("--background", "proxy", "--store", f"sqlite:{tmp_path / 'copies.db'}")
    proxy = launch_proxy(*options, "--shutdown-grace-s", "0.5")
    ended = terminate_in_the_middle(proxy, vllm)
    assert_failed(ended.events, saying="shutting down")
    assert ended.error is None
    wait_until_idle(raw, vllm)
    with openai_client(launch_proxy(*options).url, vllm) as client:
        assert retrieve(client, ended.events) == ended.events


def test_terminated_proxy_leaves_vllm_the_response_that_it_makes(
    launch_proxy: LaunchProxy, vllm: Server, tmp_path: Path
) -> None:
    """No false ending where vLLM goes on: the stream just ends, and resumes after a restart."""
    for attempt in range(5):  # the tiny model may be done within the grace
        copies = tmp_path / f"{attempt}.db"
        options = ("--background", "upstream", "--store", f"sqlite:{copies}")
        proxy = launch_proxy(*options, "--shutdown-grace-s", "0.1")
        try:  # not so long that its end is not worth the wait
            ended = terminate_in_the_middle(proxy, vllm, max_output_tokens=3000)
        except openai.BadRequestError as error:
            assert not vllm.ours
            pytest.skip(f"this vLLM stores no responses: {error}")
        if not any(is_terminal(event) for event in ended.events):
            break
    else:
        pytest.fail("vLLM was done each time")
    assert ended.error is None
    with openai_client(launch_proxy(*options).url, vllm) as client:
        rest = retrieve(client, ended.events, starting_after=ended.events[-1].sequence_number)
        assert retrieve(client, ended.events) == ended.events + rest
    assert rest[-1].type in {"response.incomplete", "response.completed"}
    assert [event for event in ended.events + rest if is_terminal(event)] == [rest[-1]]


def ask(client: openai.OpenAI, vllm: Server, asked: dict[str, Any]) -> Ended:
    """Ask for a direct stream and read it to its end."""
    with client.responses.create(model=vllm.model, stream=True, **asked) as events:
        return read_on(events, [])


def read_on(events: Iterator[ResponseStreamEvent], seen: list[ResponseStreamEvent]) -> Ended:
    """Read a stream to its end, however it ends."""
    error: Exception | None = None
    try:
        seen.extend(events)
    except openai.APIConnectionError as caught:
        error = caught
    return Ended(seen, error)


def terminate_in_the_middle(proxy: ProxyProcess, vllm: Server, **changed: Any) -> Ended:
    """Follow a long background response and end its proxy with SIGTERM, exit status 0."""
    asked = LONG | changed
    with openai_client(proxy.url, vllm) as client:
        events = client.responses.create(model=vllm.model, background=True, stream=True, **asked)
        with events:
            seen = list(islice(events, BEGINNING))
            proxy.terminate()
            ended = read_on(events, seen)
    assert proxy.wait() == 0
    return ended
