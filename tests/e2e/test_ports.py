"""Two ports: what belongs to upstream, and what belongs to the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.settings import load_settings
from tests.e2e.raw import GET, assert_refused, head, talk
from tests.e2e.wire import exchange
from tests.fake_scripts import echo

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import FakeVllm

ADMIN = [
    ("GET", "/livez"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("GET", "/config"),
    ("POST", "/drain"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
]


async def test_traffic_port_answers_nothing_of_its_own(
    fake: FakeVllm, lastword: StartLastword
) -> None:
    """The admin port's paths are upstream's on the traffic port, like any other."""
    proxy = await lastword()
    fake.handler = echo
    for method, target in ADMIN:
        answer = await exchange(proxy.url, method, target)
        assert (answer.status, answer.json()["target"]) == (200, target)
    assert [request.target.decode() for request in fake.requests] == [t for _, t in ADMIN]


async def test_admin_port_asks_upstream_nothing(fake: FakeVllm, lastword: StartLastword) -> None:
    """Nothing goes up from the admin port, whatever is asked there."""
    proxy = await lastword()
    for method, target in [("GET", "/livez"), ("GET", "/metrics"), ("GET", "/v1/models")]:
        await exchange(proxy.admin_url, method, target)
    assert fake.connections == 0


def test_both_ports_bind_loopback_unless_told_otherwise() -> None:
    """A proxy that was just started is reached from its own machine alone."""
    settings = load_settings(upstream="http://x")
    assert (settings.host, settings.admin_host) == ("127.0.0.1", "127.0.0.1")


async def test_admin_port_has_the_same_limits(lastword: StartLastword) -> None:
    """What the traffic port refuses, the admin port does too: by count, by time, by form."""
    proxy = await lastword(max_headers=20, header_timeout_s=0.2)
    assert_refused(await talk(proxy.admin_url, [head(*[b"X-A: 1"] * 20)]), 431)
    assert_refused(await talk(proxy.admin_url, [GET[:-2]]), 408)
    assert_refused(await talk(proxy.admin_url, [head(host=None)]), 400)


async def test_refused_requests_are_counted(lastword: StartLastword) -> None:
    """The metric tells how many were refused, by status."""
    proxy = await lastword()
    for data in (head(host=None), head(b"Host: b"), b"GET /x HTTP/2.0\r\nHost: a\r\n\r\n"):
        await talk(proxy.url, [data])
    metrics = (await exchange(proxy.admin_url, "GET", "/metrics")).body.decode()
    assert 'lastword_refused_requests_total{status="400"} 2.0' in metrics
    assert 'lastword_refused_requests_total{status="505"} 1.0' in metrics
