"""The sidecar's pod: how its two containers start, and how they end."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from tests.deploy.manifests import PROBES, rendered
from tests.e2e.wire import connect
from tests.fake_scripts import stream, vllm_events
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.deploy.manifests import Object, Overlay
    from tests.fake_vllm import FakeVllm


def vllm_of(overlay: Overlay) -> Object:
    """Return vLLM's container."""
    pod, _ = overlay.lastword
    containers: list[Object] = pod.spec["containers"]
    (container,) = containers
    assert container["name"] == "vllm"
    return container


def test_sidecar_starts_first_and_stays() -> None:
    """Lastword is a native sidecar, and the only way to vLLM is through it."""
    sidecar = rendered("sidecar")
    pod, container = sidecar.lastword
    assert container in pod.spec["initContainers"]
    assert container["restartPolicy"] == "Always"
    arguments = vllm_of(sidecar)["args"]
    assert [item for item in arguments if item.startswith("--host")][-1] == "--host=127.0.0.1"
    upstream = sidecar.settings.upstream
    assert upstream.startswith("http://127.0.0.1:")
    assert f"--port={urlsplit(upstream).port}" in arguments


def test_nothing_but_the_end_of_the_pod_drains() -> None:
    """The kubelet calls preStop when a probe fails too, and a drained proxy stays drained."""
    vllm = vllm_of(rendered("sidecar"))
    assert "/drain" in vllm["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert not set(PROBES) & vllm.keys()


async def test_vllm_waits_until_the_proxy_is_empty(fake: FakeVllm, lastword: StartLastword) -> None:
    """VLLM's preStop, run as it is written: it starts the drain, and ends after the last stream."""
    sidecar = rendered("sidecar")
    running = await lastword()
    _, given, script = vllm_of(sidecar)["lifecycle"]["preStop"]["exec"]["command"]
    port = sidecar.settings.admin_port
    assert str(port) in script
    script = script.replace(str(port), str(urlsplit(running.admin_url).port))
    fake.script(stream(vllm_events(), gated=True))
    async with connect(running.url) as wire, httpx.AsyncClient() as client:
        await wire.post()
        answer = await wire.head()
        hook = await asyncio.create_subprocess_exec(
            *(sys.executable, given, script), stdout=asyncio.subprocess.PIPE
        )
        ended = asyncio.create_task(hook.communicate())
        async with asyncio.timeout(PATIENCE_S):
            while (await client.get(f"{running.admin_url}/readyz")).status_code != 503:  # noqa: ASYNC110 - it is asked
                await asyncio.sleep(0.01)
        assert not ended.done()
        for number in range(len(vllm_events())):
            fake.gate(str(number)).open()
        fake.gate("ending").open()
        await wire.body(answer)
        async with asyncio.timeout(PATIENCE_S):
            said, _ = await ended
    assert answer.ending == "clean"
    assert hook.returncode == 0
    assert b'"drained":true' in said
