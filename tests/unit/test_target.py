"""Which request targets go up."""

from __future__ import annotations

import pytest

from proxy.errors import BadRequestError
from proxy.gateway.target import check_target


@pytest.mark.parametrize(
    "target",
    [
        b"/",
        b"/v1/responses?stream=true&starting_after=3",
        b"/v1/models/Qwen%2FQwen3-8B",
        b"/a//b",
        b"/a/...",
        b"/.well-known/x",
        b"/x?q=../..&r=%5C%00",
        b"/x%20y%23z",
        b"/%252e%252e/x",
        b"/?",
        b"/v1/..x/y",
        b"/v1/x%2e",
        b"/v1/caf%C3%A9",
        b"/v1;p=1/x",
        b"/v1/%2F%2Fevil.example",
    ],
)
def test_passes(target: bytes) -> None:
    """Paths that mean what they say pass, encoded slashes among them."""
    check_target(target)


@pytest.mark.parametrize(
    "target",
    [
        b"",
        b"*",
        b"http://evil.example/v1",
        b"evil.example:443",
        b"//evil.example/x",
        b"/..",
        b"/v1/../metrics",
        b"/v1/./x",
        b"/v1/%2e%2e/metrics",
        b"/v1/.%2E/x",
        b"/v1/..%2f..%2fmetrics",
        b"/v1\\x",
        b"/v1%5cx",
        b"/v1%5Cx",
        b"/v1/%00",
        b"/v1/%0d%0aX:%20y",
        b"/v1/%7f",
        b"/v1/\x01",
        b"/v1?a=\x7f",
        b"/v1#x",
        b"/v1 x",
        b"//",
        b"/.",
        b"/%2E",
        b"/v1/%2E%2e/metrics",
        b"/v1/.%2e",
        b"/v1%2F..%2Fmetrics",
        b"/v1%2f%2e%2e%2fmetrics",
        b"/v1/%0A",
        b"/v1/%1f",
        b"/v1\t",
        b"/v1?a=\x00",
        b"/v1?a=b\\c",
        b"/v1?a#b",
        "/v1/é".encode(),
        b"/v1?a=\xff",
        b"HTTP://evil.example/v1",
        b"?x",
        b" /v1",
    ],
)
def test_refused(target: bytes) -> None:
    """Anything that could mean another place is 400."""
    with pytest.raises(BadRequestError) as caught:
        check_target(target)
    assert caught.value.status == 400
