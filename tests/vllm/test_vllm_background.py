"""Background responses of a real vLLM, kept by the proxy: the replay is the stream, and it ends.

Both who make them are asked the same: vLLM itself (`--background upstream`) and the proxy.
"""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import openai
import pytest
from openai.types.responses import (
    ResponseCompletedEvent,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
    ResponseTextDeltaEvent,
)

from tests.vllm.conftest import TIME_LIMIT, ProxyProcess, openai_client, until
from tests.vllm.test_vllm_responses import (
    COMPLETED,
    LONG_RUN_TOKENS,
    TRUNCATED,
    corrected,
    dump,
    is_terminal,
    metric,
    response_id,
    retrieve,
    stream,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from openai.types.responses import Response, ResponseStreamEvent

    from tests.vllm.conftest import LaunchProxy, Server

pytestmark = TIME_LIMIT

T = TypeVar("T")

MODES = ("upstream", "proxy")
LONG: dict[str, Any] = {
    "input": "moby",
    "max_output_tokens": LONG_RUN_TOKENS,
    "extra_body": {"ignore_eos": True},
}
# Long enough to leave in the middle of it, short enough to wait for its end.
MIDDLE_RUN_TOKENS = 250
MIDDLE_RUN: dict[str, Any] = LONG | {"max_output_tokens": MIDDLE_RUN_TOKENS}
# vLLM accepts it, says created and in_progress, and then fails inside.
FAILS: dict[str, Any] = TRUNCATED | {"extra_body": {"logit_bias": {"999999": 1}}}
HANGS_S = 5.0
UPSTREAM_IDLE_S = 8.0
BEGINNING = 8
"""Events that a client reads of a stream before something happens in the middle of it."""


@dataclass(frozen=True)
class Keeper:
    """A proxy that keeps copies, and openai-python talking through it."""

    mode: str
    url: str
    client: openai.OpenAI


@pytest.fixture(scope="session")
def storing(bare: openai.OpenAI, vllm: Server) -> None:
    """Skip where the vLLM under test has no store, without which it makes no background ones."""
    try:
        bare.responses.create(model=vllm.model, background=True, **TRUNCATED)
    except openai.BadRequestError as error:
        assert not vllm.ours
        pytest.skip(f"this vLLM stores no responses: {error}")


@pytest.fixture(scope="session")
def telling(bare: openai.OpenAI, vllm: Server) -> None:
    """Skip where the vLLM under test itself calls a truncated response completed."""
    end = stream(bare, vllm, **TRUNCATED)[-1]
    assert isinstance(end, ResponseCompletedEvent | ResponseIncompleteEvent)
    if end.response.status != "incomplete":
        assert not vllm.ours
        pytest.skip("this vLLM (before 0.14) calls a truncated response completed: no rule tells")


@pytest.fixture(scope="module", params=MODES)
def keeper(
    request: pytest.FixtureRequest, vllm: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Keeper]:
    """Give a proxy that keeps copies, once for each who makes them: in a file, in memory."""
    mode: str = request.param
    folder = tmp_path_factory.mktemp(mode)
    store = "memory:"
    if mode == "upstream":
        request.getfixturevalue("storing")
        store = f"sqlite:{folder / 'copies.db'}"
    options = ("--background", mode, "--store", store)
    with (
        ProxyProcess(vllm.url, folder / "proxy.log", *options) as proxy,
        openai_client(proxy.url, vllm) as client,
    ):
        yield Keeper(mode, proxy.url, client)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """Give each of those who can make a background response, for a proxy of the test's own."""
    mode: str = request.param
    if mode == "upstream":
        request.getfixturevalue("storing")
    return mode


@pytest.mark.usefixtures("telling")
def test_replay_equals_the_stream(keeper: Keeper, vllm: Server) -> None:
    """The upstream fix's scenario: `replay_events == events`, the last is `response.incomplete`."""
    events = stream(keeper.client, vllm, background=True, **TRUNCATED)
    assert retrieve(keeper.client, events) == events
    end = events[-1]
    assert isinstance(end, ResponseIncompleteEvent)
    assert end.response.status == "incomplete"
    assert end.response.incomplete_details is not None
    assert end.response.incomplete_details.reason == "max_output_tokens"
    assert [event for event in events if is_terminal(event)] == [end]
    assert numbers(events) == list(range(len(events)))
    assert all(response.background is True for response in responses(events))


def test_replay_after_a_number_is_the_rest(keeper: Keeper, vllm: Server) -> None:
    """`starting_after` gives the greater numbers, at every number, beyond the last one nothing.

    Beyond the last one bare vLLM stays open for ever.
    """
    events = stream(keeper.client, vllm, background=True, **TRUNCATED)
    for number in (*numbers(events), len(events) + 100):
        rest = retrieve(keeper.client, events, starting_after=number)
        assert rest == events[number + 1 :]
    assert retrieve(keeper.client, events, starting_after=-1) == events


def test_response_object_is_that_of_the_last_event(keeper: Keeper, vllm: Server) -> None:
    """GET without `stream` gives the response as it ended."""
    events = stream(keeper.client, vllm, background=True, **TRUNCATED)
    response = keeper.client.responses.retrieve(response_id(events))
    assert dump(response) == dump(responses(events)[-1])
    assert response.background is True
    assert response.output_text == text(events)


@pytest.mark.usefixtures("telling")
def test_resume_helper_gives_the_rest(keeper: Keeper, vllm: Server) -> None:
    """openai-python's `responses.stream(response_id=…, starting_after=…)` yields the rest.

    It knows no end but `response.completed`, so that asked for the final response of a truncated
    one it raises, as it does with OpenAI itself (openai-python#3538).
    """
    events = stream(keeper.client, vllm, background=True, **TRUNCATED)
    middle = len(events) // 2
    resume = keeper.client.responses.stream(response_id=response_id(events), starting_after=middle)
    with resume as resumed:
        rest = list(resumed)
        with pytest.raises(RuntimeError, match=r"response\.completed"):
            resumed.get_final_response()
    assert kinds(rest) == kinds(events[middle + 1 :])
    assert rest[-1].type == "response.incomplete"


def test_resume_helper_gives_the_final_response(keeper: Keeper, vllm: Server) -> None:
    """Of a response that completed, the resume helper gives the rest and the final response."""
    events = stream(keeper.client, vllm, background=True, **COMPLETED)
    resume = keeper.client.responses.stream(response_id=response_id(events), starting_after=3)
    with resume as resumed:
        rest = list(resumed)
        final = resumed.get_final_response()
    assert kinds(rest) == kinds(events[4:])
    assert rest[-1].type == "response.completed"
    assert json.loads(final.output_text) == "Call me Ishmael"


@pytest.mark.usefixtures("telling")
def test_polling_without_a_stream_until_it_ends(keeper: Keeper, vllm: Server) -> None:
    """Created without `stream`, the response is queued at once and tells when it has ended.

    Its events are only there where the proxy made it; else `stream=true` is a plain refusal,
    where bare vLLM cuts the connection after a 200.
    """
    created = keeper.client.responses.create(model=vllm.model, background=True, **TRUNCATED)
    assert (created.status, created.background) == ("queued", True)
    ended = poll(keeper.client, created)
    assert (ended.status, ended.background) == ("incomplete", True)
    assert ended.output_text
    assert ended.usage is not None
    assert ended.usage.output_tokens == TRUNCATED["max_output_tokens"]

    def replay() -> list[ResponseStreamEvent]:
        with keeper.client.responses.retrieve(created.id, stream=True) as events:
            return list(events)

    if keeper.mode == "proxy":
        events = replay()
        assert isinstance(events[-1], ResponseIncompleteEvent)
        assert text(events) == ended.output_text
    else:
        with pytest.raises(openai.BadRequestError) as refused:
            replay()
        assert refused.value.param == "stream"


def test_cancel_ends_the_stream_and_its_replay(
    keeper: Keeper, raw: httpx.Client, vllm: Server
) -> None:
    """Cancelled in the middle, both end at once with `response.failed`; vLLM stops generating."""
    generated = "vllm:generation_tokens_total"
    client = keeper.client

    def cancel() -> tuple[list[ResponseStreamEvent], list[ResponseStreamEvent]]:
        wait_until_idle(raw, vllm)
        before = metric(raw, vllm, generated)
        asked: dict[str, Any] = {"model": vllm.model, "background": True, "stream": True} | LONG
        with client.responses.create(**asked) as live:
            begun = list(islice(live, BEGINNING))
            with client.responses.retrieve(response_id(begun), stream=True) as replay:
                replayed = list(islice(replay, BEGINNING))
                cancelled = client.responses.cancel(response_id(begun))
                assert cancelled.status == "cancelled"
                begun += live
                replayed += replay
        wait_until_idle(raw, vllm)
        assert 0 < metric(raw, vllm, generated) - before < LONG_RUN_TOKENS
        return begun, replayed

    begun, replayed = in_the_middle(cancel)
    assert begun == replayed
    end = begun[-1]
    assert isinstance(end, ResponseFailedEvent)
    assert dump(end.response)["status"] == "cancelled"
    assert error_code(end) == "cancelled"
    assert [event for event in begun if is_terminal(event)] == [end]
    assert numbers(begun) == list(range(len(begun)))
    assert retrieve(client, begun) == begun
    assert client.responses.cancel(response_id(begun)).status == "cancelled"
    assert client.responses.retrieve(response_id(begun)).status == "cancelled"


@pytest.mark.usefixtures("storing")
def test_vllm_itself_lets_a_cancelled_stream_hang(
    bare: openai.OpenAI, raw: httpx.Client, vllm: Server
) -> None:
    """There is something to cure: bare vLLM ends neither the stream nor the replay."""
    with bare.responses.create(model=vllm.model, background=True, stream=True, **LONG) as live:
        target = f"{vllm.url}/v1/responses/{response_id(list(islice(live, BEGINNING)))}"
        assert raw.post(f"{target}/cancel").json()["status"] == "cancelled"
        with raw.stream("GET", f"{target}?stream=true", timeout=HANGS_S) as replay:
            lines: list[str] = []
            if not hangs(replay, lines):
                assert not vllm.ours
                pytest.skip("this vLLM ends the replay of a cancelled response")
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names
    assert not {"response.completed", "response.incomplete", "response.failed"} & set(names)


def test_response_that_vllm_fails_inside_ends_at_once(
    launch_proxy: LaunchProxy, vllm: Server
) -> None:
    """Made by the proxy, a request that fails after the headers ends with `response.failed`."""
    proxy = launch_proxy("--background", "proxy")
    with openai_client(proxy.url, vllm) as client:
        events = stream(client, vllm, background=True, **FAILS)
        assert_failed(events)
        assert retrieve(client, events) == events
        assert client.responses.retrieve(response_id(events)).status == "failed"


@pytest.mark.usefixtures("storing")
def test_response_that_vllm_fails_silently_ends_after_the_idle_limit(
    launch_proxy: LaunchProxy, bare: openai.OpenAI, vllm: Server
) -> None:
    """Made by vLLM, it stays silent and says `queued` for ever: `upstream_idle_s` ends it."""
    proxy = launch_proxy(
        *("--background", "upstream"),
        *("--upstream-idle-s", f"{UPSTREAM_IDLE_S}", "--heartbeat-s", "1"),
    )
    with openai_client(proxy.url, vllm) as client:
        begin = time.monotonic()
        events = stream(client, vllm, background=True, **FAILS)
        took = time.monotonic() - begin
        assert_failed(events)
        assert retrieve(client, events) == events
        assert client.responses.retrieve(response_id(events)).status == "failed"
    if vllm.ours:
        assert bare.responses.retrieve(response_id(events)).status == "queued"
        assert took >= UPSTREAM_IDLE_S


@pytest.mark.usefixtures("telling")
def test_client_that_leaves_resumes_on_another_connection(keeper: Keeper, vllm: Server) -> None:
    """The run goes on without its client, who gets the rest after its cursor, live, to the end."""
    seen = leave_in_the_middle(keeper.client, vllm)
    with openai_client(keeper.url, vllm) as another:
        rest = retrieve(another, seen, starting_after=seen[-1].sequence_number)
    assert numbers(seen + rest) == list(range(len(seen + rest)))
    end = rest[-1]
    assert isinstance(end, ResponseIncompleteEvent)
    assert end.response.usage is not None
    assert end.response.usage.output_tokens == MIDDLE_RUN_TOKENS
    assert retrieve(keeper.client, seen) == seen + rest


@pytest.mark.usefixtures("storing")
def test_copy_is_completed_from_vllm_after_a_crash(
    launch_proxy: LaunchProxy, raw: httpx.Client, vllm: Server, tmp_path: Path
) -> None:
    """Killed and started again on its file, the proxy completes the copy from vLLM's own stream.

    The copy is then, byte for byte, vLLM's own replay with its end corrected; a client with a
    cursor sees neither gap nor repeat.
    """
    path = tmp_path / "copies.db"
    options = ("--background", "upstream", "--store", f"sqlite:{path}")
    first = launch_proxy(*options)
    with openai_client(first.url, vllm) as client:
        seen = leave_in_the_middle(client, vllm, then=lambda: kill_once_stored(first, path))
    second = launch_proxy(*options)
    with openai_client(second.url, vllm) as client:
        rest = retrieve(client, seen, starting_after=seen[-1].sequence_number)
        assert retrieve(client, seen) == seen + rest
    assert numbers(seen + rest) == list(range(len(seen + rest)))
    assert is_terminal(rest[-1])
    target = f"/v1/responses/{response_id(seen)}?stream=true"
    assert raw.get(second.url + target).content == corrected(raw.get(vllm.url + target).content)


def test_copy_fails_after_a_crash_where_the_proxy_made_it(
    launch_proxy: LaunchProxy, raw: httpx.Client, vllm: Server, tmp_path: Path
) -> None:
    """What only the dead proxy made ends with `response.failed`, which says what happened.

    The copy is a true beginning of the stream, and vLLM generates for nobody.
    """
    path = tmp_path / "copies.db"
    options = ("--background", "proxy", "--store", f"sqlite:{path}")
    first = launch_proxy(*options)
    with openai_client(first.url, vllm) as client:
        seen = leave_in_the_middle(
            client,
            vllm,
            then=lambda: kill_once_stored(first, path),
            max_output_tokens=LONG_RUN_TOKENS,
        )
    second = launch_proxy(*options)
    wait_until_idle(raw, vllm)
    with openai_client(second.url, vllm) as client:
        copy = retrieve(client, seen)
        assert retrieve(client, seen) == copy
        assert client.responses.retrieve(response_id(seen)).status == "failed"
    assert_failed(copy, saying="restarted")
    common = min(len(seen), len(copy) - 1)
    assert copy[:common] == seen[:common]
    assert common > 1


@pytest.mark.usefixtures("storing", "telling")
def test_auto_leaves_it_to_a_vllm_with_a_store(
    launch_proxy: LaunchProxy, bare: openai.OpenAI, vllm: Server
) -> None:
    """By default vLLM makes the response, and its own replay has the same events."""
    proxy = launch_proxy("--background", "auto")
    with openai_client(proxy.url, vllm) as client:
        events = stream(client, vllm, background=True, **TRUNCATED)
        assert retrieve(client, events) == events
        assert retrieve(bare, events)[:-1] == events[:-1]
        assert isinstance(events[-1], ResponseIncompleteEvent)


def test_auto_makes_it_where_vllm_has_no_store(
    launch_proxy: LaunchProxy, storeless_vllm: Server
) -> None:
    """Where vLLM refuses a background response, the proxy makes it: streamed, polled, cancelled."""
    server = storeless_vllm
    with (
        openai_client(server.url, server) as bare,
        pytest.raises(openai.BadRequestError, match=r"(?i)store"),
    ):
        stream(bare, server, background=True, **TRUNCATED)
    proxy = launch_proxy("--background", "auto", upstream=server.url)
    with openai_client(proxy.url, server) as client:
        for _ in range(2):  # found out, and remembered
            events = stream(client, server, background=True, **TRUNCATED)
            assert isinstance(events[-1], ResponseIncompleteEvent)
            assert all(response.background is True for response in responses(events))
            assert retrieve(client, events) == events
            assert retrieve(client, events, starting_after=4) == events[5:]
        polled = client.responses.create(model=server.model, background=True, **TRUNCATED)
        assert polled.status == "queued"
        assert poll(client, polled).status == "incomplete"

        def cancel() -> list[ResponseStreamEvent]:
            begun = leave_in_the_middle(client, server)
            assert client.responses.cancel(response_id(begun)).status == "cancelled"
            return begun

        begun = in_the_middle(cancel)
        cancelled = retrieve(client, begun)
        assert isinstance(cancelled[-1], ResponseFailedEvent)
        assert error_code(cancelled[-1]) == "cancelled"


def in_the_middle(cancel: Callable[[], T]) -> T:
    """Begin a response and cancel it; again if the tiny model was done before the cancel came."""
    for _ in range(9):
        try:
            return cancel()
        except openai.BadRequestError as error:
            assert "Cannot cancel an incomplete response" in str(error)  # noqa: PT017
    return cancel()


def leave_in_the_middle(
    client: openai.OpenAI,
    vllm: Server,
    *,
    then: Callable[[], None] = lambda: None,
    **changed: Any,
) -> list[ResponseStreamEvent]:
    """Begin a background stream, read a few events, do `then` and leave; return what was seen."""
    with client.responses.create(
        model=vllm.model, background=True, stream=True, **MIDDLE_RUN | changed
    ) as live:
        seen = list(islice(live, BEGINNING))
        then()
    assert not any(is_terminal(event) for event in seen)
    return seen


def kill_once_stored(proxy: ProxyProcess, path: Path) -> None:
    """Kill a proxy when the disk has a beginning of the copy, for which no live event waits."""
    query = "SELECT coalesce(max(upto), 0) FROM batches"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        until(lambda: database.execute(query).fetchone()[0] >= BEGINNING // 2)
    proxy.kill()


def poll(client: openai.OpenAI, response: Response) -> Response:
    """Ask for a response until it has ended."""
    found = response

    def has_ended() -> bool:
        nonlocal found
        found = client.responses.retrieve(response.id)
        return found.status not in {"queued", "in_progress"}

    until(has_ended)
    return found


def wait_until_idle(raw: httpx.Client, vllm: Server) -> None:
    """Wait for vLLM to generate nothing any more."""
    until(lambda: not metric(raw, vllm, "vllm:num_requests_running"))


def hangs(response: httpx.Response, lines: list[str]) -> bool:
    """Read on until the stream ends, or is silent for the time limit it was opened with."""
    try:
        lines.extend(response.iter_lines())
    except httpx.ReadTimeout:
        return True
    return False


def assert_failed(events: list[ResponseStreamEvent], *, saying: str = "") -> None:
    """Assert that a stream ended with `response.failed`, once, by the next number."""
    end = events[-1]
    assert isinstance(end, ResponseFailedEvent)
    assert end.response.status == "failed"
    assert end.response.id == response_id(events)
    assert error_code(end) == "server_error"
    assert end.response.error is not None
    assert saying in end.response.error.message
    assert [event for event in events if is_terminal(event)] == [end]
    assert numbers(events) == list(range(len(events)))


def error_code(event: ResponseFailedEvent) -> str | None:
    """Return the code of the error, which may be none of those that the SDK's types know."""
    error = dump(event.response)["error"]
    return None if error is None else error["code"]


def numbers(events: Iterable[ResponseStreamEvent]) -> list[int]:
    """Return the sequence numbers."""
    return [event.sequence_number for event in events]


def kinds(events: Iterable[Any]) -> list[tuple[int, str]]:
    """Return numbers and types, which are the same in events that a helper has enriched."""
    return [(event.sequence_number, event.type) for event in events]


def responses(events: Iterable[ResponseStreamEvent]) -> list[Response]:
    """Return the response objects that the events hold."""
    return [event.response for event in events if hasattr(event, "response")]


def text(events: Iterable[ResponseStreamEvent]) -> str:
    """Return the text of the answer, put together as a client does."""
    return "".join(event.delta for event in events if isinstance(event, ResponseTextDeltaEvent))
