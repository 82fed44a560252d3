"""What a client of a real vLLM sees through the proxy, and that vLLM alone would have shown else.

`make test-vllm` runs this against vLLM 0.32.0 with a tiny random model; VLLM_URL and VLLM_MODEL
(and VLLM_API_KEY) name another server, which nobody else should be using meanwhile.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from openai.types.responses import (
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseIncompleteEvent,
)

from tests.vllm.conftest import TIME_LIMIT, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from openai.types.responses import ResponseStreamEvent
    from pydantic import BaseModel

    from tests.vllm.conftest import Server, StartProxy

pytestmark = TIME_LIMIT

TRUNCATED: dict[str, Any] = {
    "input": "Tell me a long story about a whale.",
    "temperature": 0,
    "max_output_tokens": 30,
}
# Every model completes this one: the grammar leaves it nothing else to say.
COMPLETED: dict[str, Any] = {
    "input": "Call me",
    "temperature": 0,
    "max_output_tokens": 1024,
    "text": {
        "format": {"type": "json_schema", "name": "line", "schema": {"enum": ["Call me Ishmael"]}}
    },
}
LONG_RUN_TOKENS = 12_000
LONG_RUN: dict[str, Any] = {
    "input": "moby",
    "max_output_tokens": LONG_RUN_TOKENS,
    "ignore_eos": True,
}
TRIES = 20

VARYING_IDS = {"id", "item_id", "created", "created_at", "completed_at"}
VARYING_BYTES = re.compile(
    rb'"(?:id|item_id)":"[^"]*"|"(?:created|created_at|completed_at)":[0-9.]+'
)


@pytest.fixture(scope="session")
def bare_end(bare: openai.OpenAI, vllm: Server) -> ResponseStreamEvent:
    """Give the last event of a truncated stream as vLLM itself sends it."""
    end = stream(bare, vllm, **TRUNCATED)[-1]
    assert isinstance(end, ResponseCompletedEvent | ResponseIncompleteEvent)
    if end.response.status != "incomplete":
        assert not vllm.ours
        pytest.skip(
            "this vLLM calls a truncated response completed (before 0.14): no rule can tell"
        )
    return end


@pytest.fixture(scope="session")
def stored(client: openai.OpenAI, vllm: Server) -> list[ResponseStreamEvent]:
    """Give the events of a truncated background stream, which vLLM has stored."""
    try:
        return stream(client, vllm, background=True, **TRUNCATED)
    except openai.BadRequestError as error:
        assert not vllm.ours
        pytest.skip(f"this vLLM stores no responses: {error}")


def test_vllm_itself_ends_a_truncated_stream_with_completed(
    bare_end: ResponseStreamEvent, vllm: Server
) -> None:
    """There is something to correct: bare vLLM says incomplete inside `response.completed`."""
    if isinstance(bare_end, ResponseIncompleteEvent) and not vllm.ours:
        pytest.skip("this vLLM has the fix: it needs no proxy for this")
    assert isinstance(bare_end, ResponseCompletedEvent)
    assert bare_end.type == "response.completed"
    assert bare_end.response.status == "incomplete"


def test_truncated_stream_ends_with_incomplete(
    client: openai.OpenAI, vllm: Server, bare_end: ResponseStreamEvent
) -> None:
    """A stream that hits `max_output_tokens` ends with `response.incomplete`, and only its end."""
    events = stream(client, vllm, **TRUNCATED)
    end = events[-1]
    assert isinstance(end, ResponseIncompleteEvent)
    assert end.type == "response.incomplete"
    assert end.response.status == "incomplete"
    assert end.response.incomplete_details is not None
    assert end.response.incomplete_details.reason == "max_output_tokens"
    assert [event for event in events if is_terminal(event)] == [end]


def test_nothing_but_the_name_of_the_last_event_differs(
    client: openai.OpenAI, bare: openai.OpenAI, vllm: Server, bare_end: ResponseStreamEvent
) -> None:
    """Apart from ids and times, the events are vLLM's own, all but the last one's type."""

    def proxied() -> list[Any]:
        return [masked(dump(event)) for event in stream(client, vllm, **TRUNCATED)]

    def expected() -> list[Any]:
        events = [masked(dump(event)) for event in stream(bare, vllm, **TRUNCATED)]
        events[-1]["type"] = "response.incomplete"
        return events

    assert_same_at_last(proxied, expected)


def test_bytes_are_vllms_but_for_the_corrected_names(
    raw: httpx.Client, vllm: Server, proxy_url: str, bare_end: ResponseStreamEvent
) -> None:
    """Apart from ids and times, every byte is vLLM's, but the two names of the last event."""

    def body_from(url: str) -> bytes:
        body = {"model": vllm.model, "stream": True, **TRUNCATED}
        response = raw.post(f"{url}/v1/responses", json=body)
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return VARYING_BYTES.sub(b"", response.content)

    assert_same_at_last(lambda: body_from(proxy_url), lambda: corrected(body_from(vllm.url)))


def test_replay_of_a_background_stream_equals_it(
    client: openai.OpenAI, stored: list[ResponseStreamEvent], bare_end: ResponseStreamEvent
) -> None:
    """`retrieve(..., stream=True)` gives the events of the direct stream, the corrected end too."""
    replay = retrieve(client, stored)
    assert [dump(event) for event in replay] == [dump(event) for event in stored]
    for end in (stored[-1], replay[-1]):
        assert isinstance(end, ResponseIncompleteEvent)
        assert end.response.status == "incomplete"


def test_replay_after_a_number_is_the_rest_of_the_stream(
    client: openai.OpenAI, stored: list[ResponseStreamEvent], bare_end: ResponseStreamEvent
) -> None:
    """`starting_after` gives the events with a greater number, the corrected end among them."""
    replay = retrieve(client, stored, starting_after=3)
    assert [dump(event) for event in replay] == [
        dump(event) for event in stored if event.sequence_number > 3
    ]
    assert isinstance(replay[-1], ResponseIncompleteEvent)


def test_replayed_bytes_are_vllms_but_for_the_corrected_names(
    raw: httpx.Client,
    vllm: Server,
    proxy_url: str,
    stored: list[ResponseStreamEvent],
    bare_end: ResponseStreamEvent,
) -> None:
    """Of one stored stream, every byte passes but the two names, ids and times included."""
    target = f"/v1/responses/{response_id(stored)}?stream=true"
    bare_body = raw.get(vllm.url + target).content
    assert raw.get(proxy_url + target).content == corrected(bare_body)


def test_stored_response_passes_unchanged(
    raw: httpx.Client, vllm: Server, proxy_url: str, stored: list[ResponseStreamEvent]
) -> None:
    """GET of a response, without `stream`, is vLLM's own answer."""
    target = f"/v1/responses/{response_id(stored)}"
    assert raw.get(proxy_url + target).content == raw.get(vllm.url + target).content


def test_stream_that_completes_stays_completed(client: openai.OpenAI, vllm: Server) -> None:
    """A stream that ends normally ends with `response.completed`."""
    events = stream(client, vllm, **COMPLETED)
    end = events[-1]
    assert isinstance(end, ResponseCompletedEvent)
    assert end.type == "response.completed"
    assert end.response.status == "completed"
    assert json.loads(end.response.output_text) == "Call me Ishmael"
    assert [event for event in events if is_terminal(event)] == [end]


def test_bytes_of_a_stream_that_completes_are_vllms(
    client: openai.OpenAI,
    raw: httpx.Client,
    vllm: Server,
    proxy_url: str,
    stored: list[ResponseStreamEvent],  # asked for because it skips where vLLM stores nothing
) -> None:
    """With nothing to correct, a replay leaves byte for byte as vLLM sent it."""
    target = f"/v1/responses/{response_id(stream(client, vllm, background=True, **COMPLETED))}"
    body = raw.get(f"{vllm.url}{target}?stream=true").content
    assert b"event: response.completed\n" in body
    assert raw.get(f"{proxy_url}{target}?stream=true").content == body


def test_call_without_stream_passes_unchanged(
    client: openai.OpenAI, bare: openai.OpenAI, vllm: Server, bare_end: ResponseStreamEvent
) -> None:
    """A response object says incomplete by itself and passes as it is."""
    response = client.responses.create(model=vllm.model, stream=False, **TRUNCATED)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"

    def dumped(client: openai.OpenAI) -> Any:
        return masked(
            dump(client.responses.create(model=vllm.model, stream=False, **TRUNCATED)),
        )

    assert_same_at_last(lambda: dumped(client), lambda: dumped(bare))


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_request_can_switch_the_correction_off(
    client: openai.OpenAI, vllm: Server, mode: str, bare_end: ResponseStreamEvent
) -> None:
    """With the header `Lastword-Correct: off` or `observe` the end is as vLLM sent it."""
    headers = {"Lastword-Correct": mode}
    assert stream(client, vllm, extra_headers=headers, **TRUNCATED)[-1].type == bare_end.type


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_proxy_can_switch_the_correction_off(
    start_proxy: StartProxy,
    raw: httpx.Client,
    vllm: Server,
    mode: str,
    bare_end: ResponseStreamEvent,
) -> None:
    """With `--correct off` or `observe` the end is vLLM's, but where a request asks for `on`."""
    url = f"{start_proxy('--correct', mode)}/v1/responses"
    body = {"model": vllm.model, "stream": True, **TRUNCATED}
    assert last_name(raw.post(url, json=body)) == bare_end.type
    asked = raw.post(url, json=body, headers={"Lastword-Correct": "on"})
    assert last_name(asked) == "response.incomplete"


def test_chat_stream_passes_untouched(
    client: openai.OpenAI, raw: httpx.Client, vllm: Server, proxy_url: str
) -> None:
    """A chat stream is vLLM's, `[DONE]` included; nothing in it is looked at."""
    body: dict[str, Any] = {
        "model": vllm.model,
        "messages": [{"role": "user", "content": "moby"}],
        "temperature": 0,
        "max_tokens": 10,
    }
    with client.chat.completions.create(stream=True, **body) as chunks:
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "length"

    def body_from(url: str) -> bytes:
        response = raw.post(f"{url}/v1/chat/completions", json=body | {"stream": True})
        return VARYING_BYTES.sub(b"", response.content)

    assert body_from(proxy_url).endswith(b"data: [DONE]\n\n")
    assert_same_at_last(lambda: body_from(proxy_url), lambda: body_from(vllm.url))


def test_models_are_listed(
    client: openai.OpenAI, raw: httpx.Client, vllm: Server, proxy_url: str
) -> None:
    """The list of models is vLLM's."""
    assert vllm.model in [model.id for model in client.models.list()]
    proxied, direct = (raw.get(f"{url}/v1/models").json() for url in (proxy_url, vllm.url))
    assert masked(proxied) == masked(direct)


@pytest.mark.parametrize(
    ("method", "target", "change", "status"),
    [
        pytest.param("POST", "/v1/responses", {"max_output_tokens": -1}, 400, id="bad limit"),
        pytest.param("POST", "/v1/responses", {"model": "nobody"}, 404, id="unknown model"),
        pytest.param("GET", "/v1/responses/resp_unknown", None, 404, id="unknown response"),
        pytest.param("GET", "/v1/responses/resp_unknown?stream=true", None, 404, id="its stream"),
        pytest.param("GET", "/v1/nothing/here", None, 404, id="unknown route"),
        pytest.param("DELETE", "/v1/responses/resp_unknown", None, 405, id="unknown method"),
    ],
)
def test_errors_keep_status_and_body(
    raw: httpx.Client,
    vllm: Server,
    proxy_url: str,
    *,
    method: str,
    target: str,
    change: dict[str, Any] | None,
    status: int,
) -> None:
    """Errors of vLLM's own, also of streaming requests, arrive with its status and its body."""
    body = None if change is None else {"model": vllm.model, "stream": True, **TRUNCATED, **change}
    proxied = raw.request(method, proxy_url + target, json=body)
    direct = raw.request(method, vllm.url + target, json=body)
    assert (proxied.status_code, proxied.content) == (direct.status_code, direct.content)
    if vllm.ours:
        assert proxied.status_code == status
    assert proxied.headers.get("content-type") == direct.headers.get("content-type")


@pytest.mark.parametrize("streamed", [True, False], ids=["mid-stream", "before the first byte"])
def test_client_that_leaves_ends_the_generation(
    raw: httpx.Client, vllm: Server, proxy_url: str, *, streamed: bool
) -> None:
    """When the client leaves, vLLM stops to generate, long before it would have been done."""
    running, generated = "vllm:num_requests_running", "vllm:generation_tokens_total"
    body = {"model": vllm.model, "stream": streamed, **LONG_RUN}

    def leave() -> None:
        if not streamed:
            with pytest.raises(httpx.ReadTimeout):
                raw.post(f"{proxy_url}/v1/responses", json=body, timeout=0.5)
            return
        with raw.stream("POST", f"{proxy_url}/v1/responses", json=body) as response:
            # Held, because an iterator that is let go of closes the connection at once.
            lines = response.iter_lines()
            while next(lines) != "event: response.output_text.delta":
                pass

    for _ in range(5):  # the tiny model may be done before its client has left
        before = metric(raw, vllm, generated)
        leave()
        until(lambda: not metric(raw, vllm, running))
        if metric(raw, vllm, generated) - before < LONG_RUN_TOKENS:
            return
    pytest.fail("vLLM has generated to the end each time")


def stream(client: openai.OpenAI, vllm: Server, **request: Any) -> list[ResponseStreamEvent]:
    """Return all events of a streamed response."""
    with client.responses.create(model=vllm.model, stream=True, **request) as events:
        return list(events)


def retrieve(
    client: openai.OpenAI, events: list[ResponseStreamEvent], **query: Any
) -> list[ResponseStreamEvent]:
    """Return the events of the replay of the response that these events are of."""
    with client.responses.retrieve(response_id(events), stream=True, **query) as replay:
        return list(replay)


def response_id(events: list[ResponseStreamEvent]) -> str:
    """Return the id of the response that these events are of."""
    assert isinstance(events[0], ResponseCreatedEvent)
    return events[0].response.id


def is_terminal(event: ResponseStreamEvent) -> bool:
    """Say whether a stream may end with this event."""
    return event.type in {"response.completed", "response.incomplete", "response.failed"}


def last_name(response: httpx.Response) -> str:
    """Return the name of a stream's last event."""
    names: list[str] = re.findall(r"^event: (.*)$", response.text, re.MULTILINE)
    return names[-1]


def dump(model: BaseModel) -> dict[str, Any]:
    """Return what came, also where it is not what the SDK's types promise."""
    return model.model_dump(mode="json", warnings=False)


def masked(value: Any) -> Any:
    """Return the value without what differs between two equal requests."""
    if isinstance(value, dict):
        return {key: masked(member) for key, member in value.items() if key not in VARYING_IDS}
    if isinstance(value, list):
        return [masked(member) for member in value]
    return value


def corrected(body: bytes) -> bytes:
    """Return the stream of a truncated response as the rule wants it, by another way than ours."""
    completed, incomplete = b"response.completed", b"response.incomplete"
    before, field, last = body.rpartition(b"event: " + completed + b"\n")
    if not field:  # this vLLM has the fix
        return body
    tail = b'"type":"' + completed + b'"}\n\n'
    assert last.endswith(tail)
    return (
        before
        + field.replace(completed, incomplete)
        + last.removesuffix(tail)
        + tail.replace(completed, incomplete)
    )


def assert_same_at_last(proxied: Callable[[], Any], expected: Callable[[], Any]) -> None:
    """Assert that both give the same, in one of a few tries.

    Two equal requests may differ by themselves: vLLM joins tokens into one event when it is ahead
    of its reader. A proxy that changed anything would do so in every try.
    """
    for _ in range(TRIES - 1):
        if proxied() == expected():
            return
    assert proxied() == expected()


def metric(raw: httpx.Client, vllm: Server, name: str) -> float:
    """Return the sum of one of vLLM's metrics over its engines."""
    lines = raw.get(f"{vllm.url}/metrics").text.splitlines()
    values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{")]
    assert values, f"vLLM has no metric {name}"
    return sum(values)
