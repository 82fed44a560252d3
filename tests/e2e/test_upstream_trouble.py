"""Upstream fails before the head of its answer: an OpenAI-shaped error that names the cause."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import pytest

from tests.e2e.wire import RESPONSES, STREAM, Answer, connect, exchange, post_stream
from tests.fake_scripts import close_without_answer, echo, garbage, hang

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import StartLastword
    from tests.fake_vllm import Exchange, FakeVllm, Handler


def assert_error(answer: Answer, status: int, *words: str) -> None:
    """Check an error of the proxy's own: its status, its shape, what it says."""
    assert answer.status == status
    assert answer.values("content-type") == [b"application/json"]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "server_error"
    assert error["code"] == status
    for word in words:
        assert word in error["message"], error["message"]


async def reset_without_answer(exchange: Exchange) -> None:
    """Read the request and break the connection."""
    await exchange.read_body()
    await exchange.reset()


async def half_a_head(exchange: Exchange) -> None:
    """Stop within the head."""
    await exchange.read_body()
    await exchange.send_raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/eve")
    await exchange.cut()


async def interim_only(exchange: Exchange) -> None:
    """Say that an answer will come, and go."""
    await exchange.read_body()
    await exchange.send_raw(b"HTTP/1.1 103 Early Hints\r\n\r\n")
    await exchange.cut()


async def two_lengths(exchange: Exchange) -> None:
    """Give an answer whose end nobody can tell."""
    await exchange.read_body()
    await exchange.send_raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nabc")
    await exchange.cut()


@pytest.fixture
def bound_port() -> Iterator[int]:
    """Give a port that nobody listens on and nobody else can take."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.mark.parametrize(("method", "target"), [("POST", RESPONSES), ("GET", "/v1/models")])
async def test_refused_connection_is_502(
    method: str, target: str, bound_port: int, lastword: StartLastword
) -> None:
    """Nobody listens: the error says so and where we looked."""
    proxy = await lastword(upstream=f"http://127.0.0.1:{bound_port}")
    answer = await exchange(proxy.url, method, target, body=STREAM)
    assert_error(answer, 502, "refused", f"http://127.0.0.1:{bound_port}")


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_connection_closed_at_once_is_502(
    how: str, fake: FakeVllm, lastword: StartLastword
) -> None:
    """An upstream that accepts and hangs up is not the same as one that refuses."""
    proxy = await lastword()
    fake.accept = "close" if how == "close" else "reset"
    answer = await post_stream(proxy.url)
    assert_error(answer, 502, fake.url)
    assert "refused" not in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "script",
    [
        close_without_answer,
        reset_without_answer,
        half_a_head,
        interim_only,
        garbage,
        two_lengths,
    ],
)
async def test_no_usable_answer_is_502(
    script: Handler, fake: FakeVllm, lastword: StartLastword
) -> None:
    """Whatever is no answer becomes one error; both connections of the client's go on."""
    proxy = await lastword()
    async with connect(proxy.url) as wire:
        for target in (RESPONSES, "/v1/completions"):
            fake.script(script, echo)
            await wire.request("POST", target, body=STREAM)
            assert_error(await wire.answer(), 502, fake.url)
            await wire.request("POST", "/after", body=b"{}")
            assert (await wire.answer()).json()["target"] == "/after"
            await fake.drop_connections()
    assert len(fake.requests) == 4


async def test_silence_before_the_head_is_504(fake: FakeVllm, lastword: StartLastword) -> None:
    """An upstream that takes the request and never answers is given up, and told so."""
    proxy = await lastword(upstream_idle_s=0.2)
    fake.handler = hang
    for number, target in enumerate((RESPONSES, "/v1/completions")):
        assert_error(await exchange(proxy.url, "POST", target, body=STREAM), 504, fake.url)
        await (await fake.exchange(number)).until_closed()


async def test_connection_that_is_not_accepted_is_504(lastword: StartLastword) -> None:
    """A host that does not even take the connection is given up after connect_timeout_s."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(2):  # fill the queue: the kernel drops who comes next
            queued = stack.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex(listener.getsockname())
        proxy = await lastword(
            upstream=f"http://127.0.0.1:{listener.getsockname()[1]}", connect_timeout_s=0.2
        )
        assert_error(await post_stream(proxy.url), 504)


async def test_error_of_a_head_request_has_no_body(
    bound_port: int, lastword: StartLastword
) -> None:
    """HEAD never has a body, also when the answer is ours; the connection goes on."""
    proxy = await lastword(upstream=f"http://127.0.0.1:{bound_port}")
    async with connect(proxy.url) as wire:
        for _ in range(2):
            await wire.request("HEAD", "/v1/models")
            assert (await wire.answer(method="HEAD")).status == 502


async def test_errors_do_not_tell_secrets(bound_port: int, lastword: StartLastword) -> None:
    """Neither a key nor a body nor a trace stands in an error."""
    proxy = await lastword(upstream=f"http://127.0.0.1:{bound_port}")
    answer = await post_stream(
        proxy.url, b'{"input":"marked-body"}', [("Authorization", "Bearer marked-key")]
    )
    assert b"marked" not in answer.body
    assert b"Traceback" not in answer.body


async def test_upstream_that_comes_back_is_used(fake: FakeVllm, lastword: StartLastword) -> None:
    """A failure is not remembered: the next request tries again."""
    proxy = await lastword()
    fake.handler = echo
    await fake.stop_listening()
    assert_error(await exchange(proxy.url, "GET", "/v1/models"), 502, "refused")
    await fake.listen()
    assert (await exchange(proxy.url, "GET", "/v1/models")).status == 200
