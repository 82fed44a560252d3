"""What a client of a real vLLM sees with `--middleware proxy.middleware.Lastword`, and no proxy.

It starts a vLLM of its own, with the interpreter that LASTWORD_VLLM_PYTHON names (any from 0.28 on
runs on the torch that `make vllm` installs), and puts nothing but the package on its path.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from openai.types.responses import (
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
)

import proxy
from proxy.tools.vllm_process import VllmProcess, find_vllm_python
from tests.captures import corrected
from tests.vllm.conftest import PATIENCE_S, TIME_LIMIT, until
from tests.vllm.test_vllm_responses import COMPLETED, LONG_RUN_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai.types.responses import ResponseStreamEvent

pytestmark = TIME_LIMIT

TRUNCATED: dict[str, Any] = {"input": "moby", "temperature": 0, "max_output_tokens": 30}
# vLLM finds out that there is no such token when it has sent two events.
LATE_ERROR: dict[str, Any] = {"input": "moby", "logit_bias": {"999999": 1}}
RAISED = "The server failed before the response was finished; its log says why."
OFF = {"Lastword-Correct": "off"}
CORRECTIONS = (
    'lastword_corrections_total{from="response.completed",mode="on",to="response.incomplete"}'
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    """Give a vLLM that runs the middleware."""
    if os.environ.get("VLLM_URL"):
        pytest.skip("VLLM_URL names a server that is not ours: it cannot be given a middleware")
    python = find_vllm_python()
    if python is None:
        pytest.skip("no vLLM here: `make test-vllm` installs one")
    folder = tmp_path_factory.mktemp("middleware")
    path = folder / "path"  # with the package alone, as `pip install --no-deps` has it
    path.mkdir()
    (path / "proxy").symlink_to(Path(proxy.__file__).parent)
    with VllmProcess(
        python,
        folder / "model",
        args=["--middleware", "proxy.middleware.Lastword"],
        env={"PYTHONPATH": str(path)},
        log=folder / "vllm.log",
    ) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: VllmProcess) -> Iterator[openai.OpenAI]:
    """Give openai-python, which repeats nothing and goes through no proxy."""
    http_client = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=PATIENCE_S,
        http_client=http_client,
    ) as client:
        yield client


@pytest.fixture(scope="module")
def raw(server: VllmProcess) -> Iterator[httpx.Client]:
    """Give a plain HTTP client."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as client:
        yield client


def stream(client: openai.OpenAI, **asked: Any) -> list[ResponseStreamEvent]:
    """Create a stream and return its events."""
    with client.responses.create(model=VllmProcess.model, stream=True, **asked) as events:
        return list(events)


def test_truncated_stream_ends_with_incomplete(client: openai.OpenAI) -> None:
    """With the middleware the last event says what the response says; vLLM's own does not."""
    end = stream(client, **TRUNCATED)[-1]
    assert isinstance(end, ResponseIncompleteEvent)
    assert end.response.status == "incomplete"
    bare = stream(client, extra_headers=OFF, **TRUNCATED)[-1]
    assert isinstance(bare, ResponseCompletedEvent)
    assert bare.response.status == "incomplete"


def test_completed_stream_stays_completed(client: openai.OpenAI) -> None:
    """There is nothing to correct."""
    end = stream(client, **COMPLETED)[-1]
    assert isinstance(end, ResponseCompletedEvent)
    assert json.loads(end.response.output_text) == "Call me Ishmael"


def test_background_stream_and_its_replays(client: openai.OpenAI, raw: httpx.Client) -> None:
    """Live and replayed, whole and in part, every byte is vLLM's but the names of the last."""
    first, *_, end = stream(client, background=True, **TRUNCATED)
    assert isinstance(first, ResponseCreatedEvent)
    assert isinstance(end, ResponseIncompleteEvent)
    for query in ("?stream=true", "?stream=true&starting_after=3"):
        target = f"/v1/responses/{first.response.id}{query}"
        assert raw.get(target).content == corrected(raw.get(target, headers=OFF).content)
    again = raw.get(f"/v1/responses/{first.response.id}").json()
    assert again["status"] == "incomplete"


def test_late_error_is_a_failure(client: openai.OpenAI) -> None:
    """An error behind the head, where vLLM cuts, comes as ``response.failed``, then the cut."""
    events: list[ResponseStreamEvent] = []
    asked = {"model": VllmProcess.model, "input": LATE_ERROR["input"], "extra_body": LATE_ERROR}
    with (
        client.responses.create(stream=True, **asked) as answer,
        pytest.raises(openai.APIConnectionError),
    ):
        events.extend(answer)  # those before the cut are kept
    end = events[-1]
    assert isinstance(end, ResponseFailedEvent)
    assert end.response.status == "failed"
    assert end.response.error
    assert end.response.error.message == RAISED


def test_vllm_logs_the_late_error(
    client: openai.OpenAI, raw: httpx.Client, server: VllmProcess
) -> None:
    """The exception is raised on: vLLM's log has it, and its next answers are as ever."""
    body = {"model": server.model, "stream": True, **LATE_ERROR}
    with pytest.raises(httpx.RemoteProtocolError):
        raw.post("/v1/responses", json=body)
    until(lambda: "Exception in ASGI application" in server.log.read_text())
    assert isinstance(stream(client, **TRUNCATED)[-1], ResponseIncompleteEvent)


def test_errors_before_the_head_are_vllms(raw: httpx.Client, server: VllmProcess) -> None:
    """A status and a body, untouched; and one of our own for a wrong header."""
    body = {"model": server.model, "stream": True, "input": "x", "max_output_tokens": -1}
    answers = [raw.post("/v1/responses", json=body, headers=headers) for headers in ({}, OFF)]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].content == answers[1].content
    refused = raw.post("/v1/responses", json=body, headers={"Lastword-Correct": "yes"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "Lastword-Correct"


def test_chat_passes_untouched(raw: httpx.Client, server: VllmProcess) -> None:
    """Nothing of a chat stream is looked at."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "moby"}],
        "temperature": 0,
        "max_tokens": 10,
        "stream": True,
    }
    answer = raw.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert b'"finish_reason":"length"' in answer.content
    assert answer.content.endswith(b"data: [DONE]\n\n")


def test_client_that_leaves_ends_the_generation(raw: httpx.Client, server: VllmProcess) -> None:
    """VLLM stops to generate, and logs no error of it."""
    logged = server.log.read_text().count("Exception in ASGI application")
    body = {
        "model": server.model,
        "stream": True,
        "input": "moby",
        "max_output_tokens": LONG_RUN_TOKENS,
        "ignore_eos": True,
    }
    generated = "vllm:generation_tokens_total"
    for _ in range(5):  # the tiny model may be done before its client has left
        before = metric(raw, generated)
        with raw.stream("POST", "/v1/responses", json=body) as answer:
            lines = answer.iter_lines()
            while next(lines) != "event: response.output_text.delta":
                pass
        until(lambda: metric(raw, "vllm:num_requests_running") == 0)
        if metric(raw, generated) - before < LONG_RUN_TOKENS:
            break
    else:
        pytest.fail("vLLM has generated to the end each time")
    assert server.log.read_text().count("Exception in ASGI application") == logged


def test_corrections_show_in_vllms_metrics(client: openai.OpenAI, raw: httpx.Client) -> None:
    """A corrected stream is counted when its end has come."""
    before = metric(raw, CORRECTIONS)
    stream(client, **TRUNCATED)
    stream(client, **COMPLETED)
    assert metric(raw, CORRECTIONS) == before + 1
    assert metric(raw, "lastword_contradictions_total") == 0


def metric(raw: httpx.Client, name: str) -> float:
    """Return the sum of one of the server's metrics; 0 where it is not there."""
    lines = raw.get("/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if re.match(re.escape(name) + r"[{ ]", line)
    )
