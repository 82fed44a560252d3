"""`lastword check`: faults are found, what was not asked is told, and nothing is left running."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from proxy.tools.check import questions
from proxy.tools.check.command import run_check
from proxy.tools.check.options import CheckOptions
from proxy.tools.check.report import CheckError, Report, Verdict
from proxy.tools.check.runner import check
from tests.e2e.background import get
from tests.fake_responses_api import FakeResponsesApi
from tests.fake_scripts import (
    EVENT_STREAM,
    JSON,
    answer,
    close_without_answer,
    event,
    garbage,
    hang,
    stream,
    vllm_events,
)
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.tools.check.report import Question
    from tests.conftest import StartLastword
    from tests.fake_responses_api import Run
    from tests.fake_vllm import Exchange, FakeVllm, Handler

OK, FAULT = Verdict.OK, Verdict.FAULT
NOT_APPLICABLE, NOT_ASKED = Verdict.NOT_APPLICABLE, Verdict.NOT_ASKED
MANY = 10_000
HELD_AFTER = 5
SHORT_WAITS_S = 12.0
"""A time limit with which a stream that hangs is waited for one second."""

FAULTS = {
    questions.TRUNCATED,
    questions.LATE_ERROR,
    questions.BACKGROUND_TRUNCATED,
    questions.CURSOR_BEYOND,
    questions.CURSOR_NEGATIVE,
    questions.UNSTREAMED,
    questions.CANCELLED_STREAM,
    questions.CANCELLED_REPLAY,
    questions.BACKGROUND_LATE_ERROR,
}
IN_THE_BACKGROUND = {
    questions.BACKGROUND,
    questions.REPLAY,
    *(FAULTS - {questions.TRUNCATED, questions.LATE_ERROR}),
}


class Vllm(FakeResponsesApi):
    """A vLLM whose model talks without end: short answers are cut off, long ones need a cancel."""

    def __init__(self, fake: FakeVllm, **options: Any) -> None:
        super().__init__(fake, gated=True, **{"tokens": MANY} | options)
        self.bodies: list[dict[str, Any]] = []
        self.deletes = False

    def _begin(self, body: dict[str, Any], *, background: bool) -> Run:
        self.bodies.append(body)
        run = super()._begin(body, background=background)
        run.allowed = HELD_AFTER if body["max_output_tokens"] > 100 else MANY
        if "logit_bias" in body:
            run.fail_after = 2
        return run

    @property
    def background(self) -> list[Run]:
        """What was begun in the background."""
        return [run for run in self.runs.values() if run.background]

    @property
    def running(self) -> list[Run]:
        """What still generates; what has failed inside does not."""
        return [
            run
            for run in self.runs.values()
            if not (run.ended or run.aborted or run.fail_after is not None)
        ]


async def asked(url: str, timeout_s: float = 60.0, **options: Any) -> Report:
    """Check a server; without a time-out of its own it waits long for what is to come at once."""
    told: list[str] = []
    report = await check(CheckOptions(url, timeout_s=timeout_s, **options), told.append)
    assert told[0] == f"{url}: a truncated stream"
    assert told[-1].endswith("ending what was begun")
    return report


def with_verdict(report: Report, verdict: Verdict) -> set[Question]:
    """Give the questions that a verdict was found for, in what decides."""
    return set(report.decisive.with_verdict(verdict))


def observed(report: Report, question: Question) -> str:
    """Give what was seen, in what decides."""
    return report.decisive.answers[question].observed


async def test_faults_of_a_vllm_are_found(fake: FakeVllm) -> None:
    """Each fault that vLLM 0.14 to 0.32 have is seen; each right thing is not taken for one."""
    api = Vllm(fake)

    report = await asked(fake.url, SHORT_WAITS_S)

    assert with_verdict(report, FAULT) == FAULTS | {questions.ITEM_STATUS}
    assert with_verdict(report, NOT_ASKED) == set()
    assert report.exit_status == 1
    assert observed(report, questions.TRUNCATED) == "response.completed, status incomplete"
    assert observed(report, questions.CURSOR_BEYOND) == "stays open, silent before any event"
    assert observed(report, questions.LATE_ERROR) == "cut after 2 events, none terminal"
    assert "corrects 9 faults" in report.summary
    assert not api.running
    assert all(body["max_output_tokens"] <= 1024 for body in api.bodies)


async def test_nothing_is_wrong_through_lastword(fake: FakeVllm, lastword: StartLastword) -> None:
    """A proxy in front of such a server has none of its faults, and forgets what was asked."""
    api = Vllm(fake)
    proxy = await lastword(background="proxy")

    report = await asked(proxy.url)

    assert with_verdict(report, FAULT) == {questions.ITEM_STATUS}
    assert with_verdict(report, NOT_ASKED) == set()
    assert report.exit_status == 0
    assert "does not need Lastword" in report.summary
    assert report.server.stored == 0
    for response_id in (body["request_id"] for body in api.bodies if "request_id" in body):
        assert (await get(proxy.url, response_id=response_id)).status == 404
    await fake.until(lambda: not api.running)


async def test_store_that_is_off(fake: FakeVllm, lastword: StartLastword) -> None:
    """Without its store a vLLM makes no background responses: the proxy makes them itself."""
    Vllm(fake, store=False)
    proxy = await lastword(background="auto")

    report = await asked(fake.url, through=proxy.url)

    server = report.server
    assert set(server.with_verdict(NOT_APPLICABLE)) >= IN_THE_BACKGROUND
    assert server.answers[questions.BACKGROUND].observed == "its store is off"
    assert set(server.faults(corrects=True)) == {questions.TRUNCATED, questions.LATE_ERROR}
    assert with_verdict(report, NOT_APPLICABLE) == {questions.REASONING_EVENTS, questions.USAGE}
    assert report.exit_status == 0
    assert report.summary.startswith("Nothing that Lastword corrects came through")


async def test_key_and_headers_go_with_every_request(fake: FakeVllm) -> None:
    """With its key a guarded server is asked everything."""
    Vllm(fake, api_key="secret", store=False)
    headers = {"authorization": "Bearer secret", "x-team": "search"}

    report = await asked(fake.url, headers=headers)

    assert observed(report, questions.TRUNCATED).startswith("response.completed")
    assert {tuple(request.values("x-team")) for request in fake.requests} == {(b"search",)}


async def test_server_without_the_responses_api(fake: FakeVllm) -> None:
    """An old vLLM has nothing to correct."""

    async def old(exchange: Exchange) -> None:
        if exchange.request.target == b"/v1/models":
            await exchange.answer(200, JSON, b'{"data":[{"id":"tiny"}]}')
        else:
            await exchange.answer(404, JSON, b'{"detail":"Not Found"}')

    fake.handler = old
    report = await asked(fake.url)
    assert with_verdict(report, NOT_APPLICABLE) == set(questions.ALL)
    assert observed(report, questions.TRUNCATED) == "it has no Responses API"
    assert report.exit_status == 0


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        pytest.param(answer(401, JSON, b'{"error":"Unauthorized"}'), "wants a key", id="key"),
        pytest.param(answer(200, (), b"<html>hello</html>"), "not look like a vLLM", id="website"),
        pytest.param(answer(200, JSON, b'{"data":[]}'), "not look like a vLLM", id="no model"),
        pytest.param(answer(200, JSON, b'{"data":[{"id":"b"}]}'), "no model a; it has b", id="b"),
        pytest.param(garbage, "cannot be asked", id="no HTTP"),
        pytest.param(close_without_answer, "cannot be asked", id="closes"),
        pytest.param(hang, "no answer within 0.1", id="says nothing"),
    ],
)
async def test_server_that_cannot_be_asked(fake: FakeVllm, handler: Handler, said: str) -> None:
    """What is no vLLM, or has other models, or wants a key, is a sentence; the key is not in it."""
    fake.handler = handler
    model = "a" if said.startswith("no model") else None
    limit_s = 0.3 if handler is hang else 60.0
    with pytest.raises(CheckError, match=said) as caught:
        await asked(fake.url, limit_s, model=model, headers={"authorization": "Bearer secret"})
    assert fake.url in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_server_that_knows_no_member_of_vllms_own(fake: FakeVllm) -> None:
    """Where ``ignore_eos`` is refused the same is asked without it; an answer may then be whole."""
    api = Vllm(fake, tokens=3)

    async def strict(exchange: Exchange) -> None:
        body = json.loads(await exchange.read_body() or b"{}")
        if {"ignore_eos", "request_id"} & set(body):
            await exchange.answer(400, JSON, b'{"error":{"message":"Unknown parameter"}}')
        else:
            await api(exchange)

    fake.handler = strict
    report = await asked(fake.url, SHORT_WAITS_S)
    assert observed(report, questions.TRUNCATED_STATUS) == "its status is completed"
    assert with_verdict(report, NOT_ASKED) >= {questions.TRUNCATED_STATUS}
    assert observed(report, questions.REPLAY) == "the stream, event for event"


async def test_model_that_is_done_before_it_can_be_cancelled(fake: FakeVllm) -> None:
    """A cancel that always comes too late is told, not taken for an answer."""
    api = Vllm(fake)

    async def quick(exchange: Exchange) -> None:
        if exchange.request.target.endswith(b"/cancel"):
            await exchange.answer(400, JSON, b'{"error":{"message":"Cannot cancel"}}')
        else:
            await api(exchange)

    fake.handler = quick
    report = await asked(fake.url, SHORT_WAITS_S)
    assert observed(report, questions.CANCELLED_STREAM).startswith("finished 3 times before")
    assert report.server.answers[questions.CANCELLED_REPLAY].verdict is NOT_ASKED


@pytest.mark.parametrize(
    ("create", "limit_s", "said"),
    [
        pytest.param(
            answer(503, JSON, b'{"error":{"message":"overloaded\\u001b[2J"}}'),
            60.0,
            "it answers 503: overloaded [2J",
            id="busy",
        ),
        pytest.param(
            answer(200, JSON, b"{}"), 60.0, "no event stream but application/json", id="JSON"
        ),
        pytest.param(hang, 1.0, "no answer within", id="silent"),
        pytest.param(close_without_answer, 60.0, "the connection failed", id="closes"),
        pytest.param(
            stream([b": ping\n\n"], ending="hang"),
            1.5,
            "stays open, silent before any event",
            id="no news",
        ),
    ],
)
async def test_question_that_cannot_be_asked(
    fake: FakeVllm, create: Handler, limit_s: float, said: str
) -> None:
    """A question without a usable answer is told with its reason, and is no good news."""
    fake.handler = only_creates(create)
    report = await asked(fake.url, limit_s)
    assert said in observed(report, questions.TRUNCATED)
    assert with_verdict(report, FAULT) == set()
    assert report.exit_status == 3
    assert "could not be asked" in report.summary


@pytest.mark.parametrize(
    ("events", "ending", "said"),
    [
        pytest.param(vllm_events()[:4], "cut", "cut after 4 events, none terminal", id="cut"),
        pytest.param(
            [b"data: \x00{[\n\n"], "end", "ends after 1 event, none terminal", id="garbage"
        ),
        pytest.param(vllm_events() * 2, "end", "11 events behind the terminal one", id="twice"),
        pytest.param(vllm_events(), "hang", "stays open after its terminal event", id="open"),
    ],
)
async def test_stream_that_does_not_end_once(
    fake: FakeVllm, events: list[bytes], ending: Any, said: str
) -> None:
    """A stream has one terminal event, and ends behind it."""
    fake.handler = only_creates(stream(events, ending=ending))
    report = await asked(fake.url, 3.0 if ending == "hang" else 60.0)
    assert said in observed(report, questions.ONE_END)
    assert report.exit_status == 1


async def test_own_time_limit_ends_what_was_begun(fake: FakeVllm) -> None:
    """When the time is over the rest is told as not asked, and what was begun is cancelled."""
    api = Vllm(fake)
    begun = set[str]()
    cancelled = set[str]()

    async def endless(exchange: Exchange) -> None:
        body = json.loads(await exchange.read_body() or b"{}")
        path = exchange.request.target.decode().split("/")
        if path[-1] == "cancel":
            cancelled.add(path[-2])
        if not body.get("background"):
            await api(exchange)
            return
        begun.add(body["request_id"])
        await exchange.respond(200, EVENT_STREAM)
        while True:
            await exchange.send(event("ping", 0))
            await asyncio.sleep(0.02)

    fake.handler = endless
    report = await asked(fake.url, 6.0)
    assert with_verdict(report, NOT_ASKED) >= {questions.BACKGROUND, questions.REPLAY}
    assert observed(report, questions.BACKGROUND) == "the time was over (6 s, --timeout-s)"
    assert cancelled == begun


async def test_ctrl_c_ends_what_was_begun(fake: FakeVllm) -> None:
    """A user who loses patience, even twice, leaves nothing running on the server."""
    api = Vllm(fake, api_key="secret")

    async def with_slow_cancels(exchange: Exchange) -> None:
        if exchange.request.target.endswith(b"/cancel"):
            await exchange.gate("cancel")
        await api(exchange)

    fake.handler = with_slow_cancels
    async with command(fake.url, VLLM_API_KEY="secret") as process:
        await fake.until(lambda: any(run.background for run in api.running))
        process.send_signal(signal.SIGINT)
        await fake.gate("cancel").arrived()
        process.send_signal(signal.SIGINT)
        fake.gate("cancel").open()
        out, err = await process.communicate()
    assert process.returncode == 130, err
    assert out == b""
    assert err == b"lastword: interrupted; what was begun is cancelled\n"
    await fake.until(lambda: not api.running)
    deleted = {r.target for r in fake.requests if r.method == "DELETE"}
    assert {f"/v1/responses/{run.response_id}".encode() for run in api.background} <= deleted


async def test_sigterm_ends_what_was_begun(fake: FakeVllm) -> None:
    """What stops a container does the same."""
    api = Vllm(fake)
    checking = asyncio.create_task(run_check(CheckOptions(fake.url), as_json=False))
    await fake.until(lambda: any(run.background for run in api.running))
    os.kill(os.getpid(), signal.SIGTERM)
    assert await checking == 143
    await fake.until(lambda: not api.running)


async def test_json_for_machines(fake: FakeVllm, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON is the documented one, and the exit status is in it."""
    Vllm(fake)
    assert await run_check(CheckOptions(fake.url, timeout_s=SHORT_WAITS_S), as_json=True) == 1
    out, err = capsys.readouterr()
    assert err == ""
    told = json.loads(out)
    assert list(told) == [
        *("version", "lastword", "exit_status", "summary", "server", "through", "questions")
    ]
    assert (told["version"], told["exit_status"], told["through"]) == (1, 1, None)
    assert told["server"] == {
        "url": fake.url,
        "vllm": None,
        "model": "tiny",
        "to_correct": [question.id for question in questions.ALL if question in FAULTS],
        "left": ["item_status"],
        "not_asked": [],
        "stored": 4,
    }
    assert told["questions"][0] == {
        "id": "truncated",
        "what": "truncated stream",
        "server": {"verdict": "fault", "observed": "response.completed, status incomplete"},
        "through": None,
        "lastword": {"corrects": True, "does": "ends with response.incomplete"},
        "issues": [
            "https://github.com/vllm-project/vllm/issues/59324",
            "https://github.com/vllm-project/vllm/issues/45386",
        ],
    }


async def test_json_of_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Machines get JSON also where nothing could be asked."""
    with pytest.raises(CheckError, match="cannot be asked"):
        await run_check(CheckOptions("http://127.0.0.1:1"), as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["exit_status"], told["questions"]) == (2, [])
    assert "cannot be asked" in told["summary"]


def only_creates(create: Handler) -> Handler:
    """Answer as a server whose creates are answered by a script, and which has nothing else."""

    async def handler(exchange: Exchange) -> None:
        if exchange.request.method == "POST":
            await create(exchange)
        else:
            await exchange.answer(200, JSON, b'{"data":[{"id":"tiny"}]}')

    return handler


@contextlib.asynccontextmanager
async def command(*args: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `lastword check` as a user does; it does not outlive the test."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "check", *args),
        env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE_S * 2):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
