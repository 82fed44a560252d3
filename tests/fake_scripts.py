"""Ready-made scripts and vLLM-shaped events for the fake upstream."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.captures import Capture
    from tests.fake_vllm import Exchange, Handler

EVENT_STREAM = (("content-type", "text/event-stream; charset=utf-8"),)
JSON = (("content-type", "application/json"),)

Ending = Literal["end", "cut", "reset", "hang", "eof"]
"""How an answer stops: properly; FIN; RST; not at all; FIN as its only framing."""


def stream(
    chunks: Iterable[bytes],
    *,
    headers: Iterable[tuple[str, str]] = EVENT_STREAM,
    status: int = 200,
    gated: bool = False,
    ending: Ending = "end",
) -> Handler:
    """Send each piece as one HTTP chunk, then stop in the given way.

    With gated, the script stands at gate "0", "1", … before each piece and at "ending" after all.
    """

    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(status, headers, framed=ending != "eof")
        for number, chunk in enumerate(chunks):
            if gated:
                await exchange.gate(str(number))
            await exchange.send(chunk)
        if gated:
            await exchange.gate("ending")
        await stop(exchange, ending)

    return script


async def stop(exchange: Exchange, ending: Ending) -> None:
    """Stop an answer in the given way."""
    match ending:
        case "end":
            await exchange.end()
        case "cut" | "eof":
            await exchange.cut()
        case "reset":
            await exchange.reset()
        case "hang":
            await exchange.wait_closed()


def play(capture: Capture, *, cuts: Sequence[int] | None = None) -> Handler:
    """Play a capture: an event per chunk as vLLM does, or cut at the given offsets of its body.

    It ends as the recorded server did: properly, cut, or never.
    """
    chunks = capture.events if cuts is None else cut(capture.body, cuts)
    if not capture.is_event_stream:
        chunks = [capture.body] if capture.body else []
    drop = {"date", "server", "transfer-encoding"}
    headers = [header for header in capture.headers if header[0].lower() not in drop]
    ending: Ending = {0: "end", 18: "cut"}.get(capture.curl_exit, "hang")  # type: ignore[arg-type, assignment]
    return stream(chunks, headers=headers, status=capture.status, ending=ending)


def cut(body: bytes, offsets: Iterable[int]) -> list[bytes]:
    """Cut bytes at the given offsets."""
    places = [0, *offsets, len(body)]
    return [body[start:end] for start, end in pairwise(places) if start < end]


def answer(status: int, headers: Iterable[tuple[str, str]] = JSON, body: bytes = b"{}") -> Handler:
    """Give a whole answer at once."""

    async def script(exchange: Exchange) -> None:
        await exchange.answer(status, headers, body)

    return script


async def echo(exchange: Exchange) -> None:
    """Answer with the request as JSON: method, target, header pairs and body (as latin-1)."""
    body = (await exchange.read_body()).decode("latin-1")
    request = exchange.request
    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers]
    told = {
        "method": request.method,
        "target": request.target.decode("latin-1"),
        "headers": pairs,
        "body": body,
    }
    await exchange.answer(200, JSON, json.dumps(told).encode())


async def hang(exchange: Exchange) -> None:
    """Read the request and never say a word."""
    await exchange.wait_closed()


async def close_without_answer(exchange: Exchange) -> None:
    """Read the request and close the connection."""
    await exchange.read_body()
    await exchange.cut()


async def garbage(exchange: Exchange) -> None:
    """Answer with something that is not HTTP."""
    await exchange.read_body()
    await exchange.send_raw(b"220 mail.example.org ESMTP\r\nand so on\r\n\r\n")
    await exchange.cut()


def event(kind: str, number: int, *, newline: bytes = b"\n", **members: Any) -> bytes:
    """Write one event as vLLM writes it: one data line, the type as the payload's last member."""
    payload = json.dumps(
        members | {"sequence_number": number, "type": kind},
        separators=(",", ":"),
        ensure_ascii=False,
    )
    return b"event: %b%b" % (kind.encode(), newline) + b"data: %b%b%b" % (
        payload.encode(),
        newline,
        newline,
    )


def response_object(status: str, response_id: str = "resp_1", **members: Any) -> dict[str, Any]:
    """Make a response object of vLLM's shape."""
    incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": response_id,
        "created_at": 1795965400,
        "incomplete_details": incomplete,
        "instructions": None,
        "metadata": None,
        "model": "tiny",
        "object": "response",
        "output": [],
        "parallel_tool_calls": True,
        "temperature": 0.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "background": False,
        "status": status,
        "usage": None,
    } | members


def vllm_events(
    status: str = "incomplete",
    *,
    deltas: int = 3,
    response_id: str = "resp_1",
    background: bool = False,
    padding: int = 0,
    newline: bytes = b"\n",
) -> list[bytes]:
    """Make a whole stream as vLLM sends it: the last event is always named completed.

    `padding` adds so many bytes of logprob-like text to the last event.
    """
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
    text = "".join(f"word{number} " for number in range(deltas))
    part: dict[str, Any] = {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": None,
    }
    place = {"item_id": "msg_1", "output_index": 0}
    inside = place | {"content_index": 0}
    begun = response_object("in_progress", response_id, background=background)
    done = item | {"content": [part]}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        (
            "response.output_item.added",
            {"output_index": 0, "item": item | {"status": "in_progress", "content": []}},
        ),
        ("response.content_part.added", inside | {"part": part | {"text": ""}}),
        *(
            ("response.output_text.delta", inside | {"delta": f"word{n} ", "logprobs": []})
            for n in range(deltas)
        ),
        ("response.output_text.done", inside | {"text": text, "logprobs": []}),
        ("response.content_part.done", inside | {"part": part}),
        ("response.output_item.done", {"output_index": 0, "item": done}),
    ]
    last = response_object(status, response_id, output=[done], background=background)
    if padding:
        last["metadata"] = {"padding": "x" * padding}
    kinds.append(("response.completed", {"response": last}))
    return [event(kind, n, newline=newline, **members) for n, (kind, members) in enumerate(kinds)]
