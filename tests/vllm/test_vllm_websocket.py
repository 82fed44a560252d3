"""What a real vLLM says to WebSockets, and what a client of the proxy hears of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.vllm.conftest import PATIENCE_S, TIME_LIMIT

if TYPE_CHECKING:
    from websockets.http11 import Response

    from tests.vllm.conftest import Server

pytestmark = TIME_LIMIT


def refusal(url: str, path: str, server: Server) -> Response:
    """Ask for a WebSocket that must be refused; return the answer."""
    target = url.replace("http", "ws", 1) + path
    with (
        pytest.raises(InvalidStatus) as caught,
        connect(target, additional_headers=server.headers, proxy=None, open_timeout=PATIENCE_S),
    ):
        pass
    return caught.value.response


def test_responses_over_a_websocket_are_426(vllm: Server, proxy_url: str) -> None:
    """The 403 of vLLM makes Codex try seven times; 426 makes it go on over HTTP at once."""
    bare = refusal(vllm.url, "/v1/responses", vllm)
    if vllm.ours:
        assert bare.status_code == 403
    assert refusal(proxy_url, "/v1/responses", vllm).status_code == 426


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/nothing"])
def test_other_refusals_are_vllms_own(path: str, vllm: Server, proxy_url: str) -> None:
    """A route that is not there, as `/v1/realtime` for a model without speech: status and body."""
    if not vllm.ours:
        pytest.skip("another vLLM may have the route")
    bare, through = (refusal(url, path, vllm) for url in (vllm.url, proxy_url))
    assert (through.status_code, through.body) == (bare.status_code, bare.body)
    assert bare.status_code in (403, 404)
