"""The settings in force, as the admin port shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from proxy.gateway.drain import Drain
from proxy.operations.admin import build_admin
from proxy.operations.metrics import Metrics
from proxy.operations.readiness import Readiness
from proxy.settings import Settings, load_settings
from tests.e2e.wire import exchange

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.fake_vllm import FakeVllm


async def test_config_shows_every_setting(fake: FakeVllm, lastword: StartLastword) -> None:
    """Options, variables and defaults alike, by their names."""
    proxy = await lastword(write_stall_s=7, correct="observe")
    got = await exchange(proxy.admin_url, "GET", "/config")
    assert got.status == 200
    config = got.json()
    assert set(config) == set(Settings.model_fields)
    assert config["upstream"] == fake.url
    assert (config["write_stall_s"], config["correct"], config["store"]) == (
        7,
        "observe",
        "memory:",
    )
    assert config["upstream_ca_file"] is None


async def test_config_and_drain_are_for_this_host() -> None:
    """Anyone else is 403, also a mesh's sidecar (Istio's is 127.0.0.6) and a web page seen here."""
    metrics, drain = Metrics(), Drain(delay_s=0, grace_s=0)
    readiness = Readiness(metrics, drain, None, None)
    app = build_admin(load_settings(upstream="http://x"), metrics, drain, readiness)
    page = {"Origin": "null"}
    elsewhere = {"Host": "a.page.example"}
    for peer, headers, status in [
        ("127.0.0.1", elsewhere, 403),
        ("192.0.2.1", {}, 403),
        ("127.0.0.6", {}, 403),
        ("::1", page, 403),
        ("127.0.0.1", page, 403),
        ("127.0.0.1", {}, 200),
        ("127.0.0.1", {"Host": "localhost:9090"}, 200),
        ("::1", {}, 200),
    ]:
        transport = httpx.ASGITransport(app, client=(peer, 1))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers=headers
        ) as client:
            assert not drain.draining or status == 200
            assert (await client.get("/config")).status_code == status
            assert (await client.post("/drain")).status_code == status
            if status == 403:
                assert (await client.get("/livez")).status_code == 200
