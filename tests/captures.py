"""What real vLLM servers sent, byte for byte: the loader of tests/data/captures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent / "data" / "captures"
VERSIONS = sorted(path.parent.name for path in ROOT.glob("*/manifest.json"))


@dataclass(frozen=True)
class Capture:
    """One recorded answer, with the request that it answers."""

    version: str
    name: str
    method: str
    target: str
    request_headers: dict[str, str]
    request_body: dict[str, Any] | str | None
    curl_exit: int | str
    """0: a clean end; 18: cut before the last chunk; 28 or words: left open by the server."""
    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    """Without chunk framing, whichever way it was recorded."""

    @property
    def id(self) -> str:
        """A name for pytest's parameters."""
        return f"{self.version}/{self.name}"

    @property
    def is_event_stream(self) -> bool:
        """Whether the answer is an event stream."""
        return dict(self.headers).get("content-type", "").startswith("text/event-stream")

    @property
    def is_truncated(self) -> bool:
        """Whether its last event is named completed while its payload says incomplete."""
        blocks = self.events
        return (
            self.is_event_stream
            and bool(blocks)
            and blocks[-1].startswith(b"event: response.completed\n")
            and json.loads(blocks[-1].partition(b"data: ")[2])["response"]["status"] == "incomplete"
        )

    @property
    def events(self) -> list[bytes]:
        """The whole events, each with its blank line; every capture uses LF alone."""
        return [block + b"\n\n" for block in self.body.split(b"\n\n")[:-1]]


@cache
def load(version: str, name: str) -> Capture:
    """Load one capture by version and name (without .http)."""
    entry = _manifest(version)[name]
    head, _, body = (ROOT / version / f"{name}.http").read_bytes().partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    _, status, reason = first.split(" ", 2)
    method, target = entry["request"].split(" ", 1)
    pairs = [line.partition(":") for line in lines]
    return Capture(
        version=version,
        name=name,
        method=method,
        target=target,
        request_headers=entry["headers"],
        request_body=entry["body"],
        curl_exit=entry["curl_exit"],
        status=int(status),
        reason=reason,
        headers=tuple((name, value.strip()) for name, _, value in pairs),
        body=_unchunk(body) if entry["raw_chunked"] else body,
    )


def all_captures() -> list[Capture]:
    """Every capture of every version."""
    return [load(version, name) for version in VERSIONS for name in _manifest(version)]


def event_streams() -> list[Capture]:
    """List the captures that are event streams, those that were cut or left open among them."""
    return [capture for capture in all_captures() if capture.is_event_stream]


def corrected(body: bytes, name: str = "response.incomplete", *, newline: bytes = b"\n") -> bytes:
    """Say what a stream that ends in vLLM's response.completed must look like downstream.

    Made without parsing: vLLM writes the name on the event's first line and, as the payload's
    last member, in its type. This stands beside the code under test, so it must not share any.
    """
    before, event, after = body.rpartition(b"event: response.completed" + newline)
    payload, member, rest = after.rpartition(b'"type":"response.completed"}')
    if not event or not member:
        raise ValueError("the stream does not end in response.completed")
    new = name.encode()
    return b'%bevent: %b%b%b"type":"%b"}%b' % (before, new, newline, payload, new, rest)


@cache
def _manifest(version: str) -> dict[str, dict[str, Any]]:
    manifest: dict[str, dict[str, Any]] = json.loads(
        (ROOT / version / "manifest.json").read_bytes()
    )
    return manifest


def _unchunk(raw: bytes) -> bytes:
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        body += raw[: int(size, 16)]
        raw = raw[int(size, 16) + 2 :]
    return body
