"""What a log line says of a request: names that a client cannot choose, or not at any length."""

from __future__ import annotations

import pytest

from proxy.gateway.record import NAME_LENGTH, brief, trace_id
from proxy.gateway.routes import ResponsesRoutes

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def test_trace_id() -> None:
    """The trace id is told, also of versions that may say more than we know."""
    assert trace_id([TRACEPARENT.encode()]) == TRACE
    assert trace_id([f"01-{TRACE}-00f067aa0ba902b7-01-more".encode()]) == TRACE


@pytest.mark.parametrize(
    "given",
    [
        pytest.param([], id="none"),
        pytest.param([TRACEPARENT] * 2, id="two"),
        pytest.param([TRACEPARENT.upper()], id="capitals"),
        pytest.param([TRACEPARENT.replace(TRACE, "0" * 32)], id="zeros"),
        pytest.param([TRACEPARENT + "-more"], id="version 00 with more"),
        pytest.param(["ff" + TRACEPARENT[2:]], id="version ff"),
        pytest.param(["Bearer key"], id="something else"),
    ],
)
def test_no_trace_id(given: list[str]) -> None:
    """What is no valid traceparent is not told (W3C Trace Context, section 3.2)."""
    assert trace_id([value.encode() for value in given]) is None


def test_brief() -> None:
    """A long name is cut: it may be as long as a request's body."""
    assert brief(None) is None
    assert brief("resp_1") == "resp_1"
    assert brief("x" * 1_000_000) == "x" * NAME_LENGTH


@pytest.mark.parametrize("prefix", ["", "/llm"])
@pytest.mark.parametrize(
    ("path", "template"),
    [
        ("/v1/responses", "/v1/responses"),
        ("/v1/responses/resp_1", "/v1/responses/{id}"),
        ("/v1/responses/resp_1/cancel", "/v1/responses/{id}/cancel"),
        ("/v1/responses/resp_1/input_items", "other"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/health", "/health"),
        ("/v1/models/Bearer", "other"),
        ("/", "other"),
    ],
)
def test_route_templates(path: str, template: str, prefix: str) -> None:
    """A route is told by its template, behind any prefix; what is not known is "other"."""
    assert ResponsesRoutes(prefix).template(prefix + path) == template
    assert ResponsesRoutes("/elsewhere").template(path) == "other"
