"""The demo: the same request straight to vLLM and through Lastword, side by side."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.core.event import parse_event
from proxy.core.event_stream import EventStreamDecoder
from proxy.core.responses import INCOMPLETE, TERMINAL_NAMES, judge, read_payload
from proxy.errors import LastwordError
from proxy.gateway.server import listening, running
from proxy.settings import load_settings
from proxy.tools.recorded_vllm import RECORDED_VERSION, build_recorded_vllm

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["run_demo"]

_LAST = 4  # events shown of each stream
_LEAVE_AFTER = 5  # events until the client of the background response leaves
_TIMEOUT_S = 120
_REQUEST = {"model": "tiny", "input": "moby", "temperature": 0, "max_output_tokens": 6}


@dataclass(frozen=True)
class _Upstream:
    url: str
    what: str
    recorded: bool


@dataclass(frozen=True)
class _Row:
    """One event as the table shows it."""

    name: str
    note: str


async def run_demo(*, vllm: bool = False) -> bool:
    """Show both streams; True if the proxy's was corrected and every other byte was equal.

    With ``vllm`` a real server is started; raises ``LastwordError`` with how to install one
    if there is none.
    """
    console = Console(soft_wrap=True)
    async with contextlib.AsyncExitStack() as stack:
        if vllm:
            console.print(
                "Starting a real vLLM on the CPU with a tiny random model (about 40 s)..."
            )
        upstream = await stack.enter_async_context(_real_vllm() if vllm else _recorded_vllm())
        quiet = {"ready_needs_upstream": False, "log_requests": False}  # the table is what counts
        proxy = await stack.enter_async_context(
            running(load_settings(upstream=upstream.url, port=0, admin_port=0, **quiet))
        )
        console.print(f"Upstream: {upstream.what}")
        console.print(f"Request:  POST /v1/responses {_REQUEST} and stream=True\n")
        bare = await _ask(upstream.url, background=not upstream.recorded)
        if upstream.recorded:
            corrected = await _ask(proxy.url)
        else:
            # A real vLLM cuts the same answer into other events each time: compare one response.
            console.print(
                "One response, which vLLM stores, is read straight and through Lastword.\n"
            )
            response_id = _response_id(bare)
            bare, corrected = [await _read(u, response_id) for u in (upstream.url, proxy.url)]
        console.print(_table(bare, corrected))
        equal = _verdict(console, bare, corrected)
        return await _show_background(console, proxy.url) and equal


async def _show_background(console: Console, url: str) -> bool:
    """Leave a background response, resume it behind the last event, and replay it whole."""
    body = _REQUEST | {"stream": True, "background": True}
    before = b""
    async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S, base_url=url) as client:
        async with client.stream("POST", "/v1/responses", json=body) as response:
            async for chunk in response.aiter_raw():
                before += chunk
                if before.count(b"\n\n") >= _LEAVE_AFTER:
                    break
        blocks = EventStreamDecoder().feed(before)
        created = read_payload(parse_event(blocks[0]).payload()) if blocks else None
        if created is None or created.response_id is None:
            console.print(f"The background response did not begin: {before!r}", style="red")
            return False
        place = f"/v1/responses/{created.response_id}?stream=true"
        number = len(blocks) - 1
        after = (await client.get(f"{place}&starting_after={number}")).content
        replay = (await client.get(place)).content
    told = len(EventStreamDecoder().feed(after))
    console.print(
        f"\nIn the background: the client left after event {number}, came back with"
        f" starting_after={number} and got the other {told}."
    )
    if b"".join(blocks) + after != replay or b"event: response.incomplete" not in after:
        console.print("The replay is not what the two connections got.", style="red")
        return False
    console.print(
        f"The replay of all {len(blocks) + told} events equals what the two connections got,"
        " byte for byte.",
        style="green",
    )
    return True


async def _ask(url: str, *, background: bool = False) -> bytes:
    """Send the demo's request as a client would and return the stream's bytes."""
    body = _REQUEST | {"stream": True} | ({"background": True} if background else {})
    async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S) as client:
        return _stream_of(url, await client.post(f"{url}/v1/responses", json=body))


async def _read(url: str, response_id: str) -> bytes:
    """Read the stream of a response that vLLM has stored."""
    async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S) as client:
        response = await client.get(f"{url}/v1/responses/{response_id}?stream=true")
        return _stream_of(url, response)


def _response_id(stream: bytes) -> str:
    payload = read_payload(parse_event(EventStreamDecoder().feed(stream)[0]).payload())
    if payload is None or payload.response_id is None:
        raise LastwordError(f"the stream does not begin with a response: {stream[:500]!r}")
    return payload.response_id


def _stream_of(url: str, response: httpx.Response) -> bytes:
    body = response.content
    if response.status_code != httpx.codes.OK:
        raise LastwordError(f"{url} answered {response.status_code}: {body[:500].decode()}")
    return body


def _rows(stream: bytes) -> list[_Row]:
    rows = []
    for block in EventStreamDecoder().feed(stream):
        event = parse_event(block)
        payload = read_payload(event.payload())
        if payload is None:
            continue
        name = payload.type or (event.name_value or b"").decode()
        terminal = name in TERMINAL_NAMES
        rows.append(_Row(name, f"status: {payload.status}" if terminal else ""))
    return rows


def _table(bare: bytes, corrected: bytes) -> Table:
    left, right = _rows(bare), _rows(corrected)
    table = Table(title=f"How the two streams end (the last {_LAST} of {len(left)} events)")
    table.add_column("straight from vLLM", no_wrap=True)
    table.add_column("through Lastword", no_wrap=True)
    for a, b in zip(left[-_LAST:], right[-_LAST:], strict=False):
        differs = a.name != b.name
        table.add_row(
            Text(a.name, style="bold red" if differs else ""),
            Text(b.name, style="bold green" if differs else ""),
        )
        if a.note or b.note:
            table.add_row(Text("  " + a.note, style="dim"), Text("  " + b.note, style="dim"))
    return table


def _verdict(console: Console, bare: bytes, corrected: bytes) -> bool:
    """Compare what came straight with what came through, by a rule written out once more here."""
    blocks = EventStreamDecoder().feed(bare)
    if not blocks or judge(blocks[-1]) is None:
        console.print("The stream did not end with a terminal event.", style="red")
        return False
    name, new = b"response.completed", INCOMPLETE.encode()
    last = blocks[-1].replace(b"event: " + name, b"event: " + new, 1)
    head, _, tail = last.rpartition(b'"type":"' + name + b'"')
    expected = b"".join(blocks[:-1]) + head + b'"type":"' + new + b'"' + tail
    if expected != corrected:
        console.print("The two streams differ in more than the last event's name.", style="red")
        return False
    console.print(
        f"\nThe answer was cut off at its token limit. Only the last event's name was changed;"
        f" the other {len(corrected) - 2 * len(new)} bytes are equal.",
        style="green",
    )
    return True


@contextlib.asynccontextmanager
async def _recorded_vllm() -> AsyncIterator[_Upstream]:
    async with listening(build_recorded_vllm()) as url:
        yield _Upstream(
            url,
            f"a recording of a real vLLM {RECORDED_VERSION}, played at token speed"
            " (demo --vllm runs a real one)",
            recorded=True,
        )


@contextlib.asynccontextmanager
async def _real_vllm() -> AsyncIterator[_Upstream]:
    import asyncio  # noqa: PLC0415
    import signal  # noqa: PLC0415
    import tempfile  # noqa: PLC0415
    from pathlib import Path  # noqa: PLC0415

    from proxy.tools.vllm_process import VllmProcess, find_vllm_python  # noqa: PLC0415

    python = find_vllm_python()
    if python is None:
        raise LastwordError(
            "no vLLM is installed here. `make vllm` installs one for the CPU into .venv-vllm;"
            " LASTWORD_VLLM_PYTHON names an interpreter that has one."
        )
    with tempfile.TemporaryDirectory(prefix="lastword-demo-") as directory:
        process = VllmProcess(python=python, model_dir=Path(directory) / "model")
        task = asyncio.current_task()
        if task is not None:  # a vLLM must not outlive its demo
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            await asyncio.to_thread(process.__enter__)
            yield _Upstream(process.url, f"a real vLLM at {process.url}", recorded=False)
        finally:
            await asyncio.to_thread(process.__exit__, None, None, None)
