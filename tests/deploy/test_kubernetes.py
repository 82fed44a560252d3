"""The manifests, rendered: they agree with themselves and with the real settings."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import pytest

import proxy
from tests.deploy.manifests import LABEL, OVERLAYS, matches, rendered
from tests.deploy.settings import accepted, last_seconds
from tests.e2e.wire import connect
from tests.fake_scripts import stream, vllm_events
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from proxy.settings import Settings
    from tests.conftest import StartLastword
    from tests.deploy.manifests import Object, Overlay
    from tests.fake_vllm import FakeVllm

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
UNITS = {"Mi": 2**20, "Gi": 2**30}


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> Overlay:
    """Give each overlay as kubectl renders it."""
    return rendered(request.param)


def settings_of(overlay: Overlay) -> Settings:
    """Return the settings that the overlay's Lastword starts with."""
    return accepted(overlay.environment(overlay.lastword[1]))


def store_of(overlay: Overlay) -> str:
    """Return where the overlay's Lastword keeps its copies."""
    return overlay.environment(overlay.lastword[1])["LASTWORD_STORE"]


def size(quantity: str) -> int:
    """Return a quantity's bytes."""
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def test_every_setting_is_one(overlay: Overlay) -> None:
    """Each LASTWORD_ variable is a setting, and its value is accepted."""
    assert settings_of(overlay).upstream


def test_ports_agree(overlay: Overlay) -> None:
    """What listens, the container's ports, the Service's and the probes' are the same."""
    pod, container = overlay.lastword
    settings = settings_of(overlay)
    assert {port["containerPort"] for port in container["ports"]} == {
        settings.port,
        settings.admin_port,
    }
    (service,) = (
        item
        for item in overlay.of("Service")
        if item["spec"]["selector"].items() <= pod.labels.items()
    )
    assert [pod.port(port["targetPort"]) for port in service["spec"]["ports"]] == [settings.port]
    for probe in PROBES:
        assert pod.port(container[probe]["httpGet"]["port"]) == settings.admin_port
    for annotation in (
        "traffic.sidecar.istio.io/excludeInboundPorts",
        "config.linkerd.io/skip-inbound-ports",
    ):
        assert pod.annotations[annotation] == str(settings.admin_port)
    assert pod.annotations.get("prometheus.io/port", str(settings.admin_port)) == str(
        settings.admin_port
    )


def test_kubelet_reaches_both_ports(overlay: Overlay) -> None:
    """Probes and clients come to the pod's address, so neither port is on loopback."""
    settings = settings_of(overlay)
    assert (settings.host, settings.admin_host) == ("0.0.0.0", "0.0.0.0")  # noqa: S104 - a pod's own


async def test_probes_ask_what_is_answered(lastword: StartLastword) -> None:
    """Starting and living ask for the process alone; readiness for what readiness is."""
    containers = [rendered(name).lastword[1] for name in OVERLAYS]
    for container in containers:
        paths = [container[probe]["httpGet"]["path"] for probe in PROBES]
        assert paths == ["/livez", "/livez", "/readyz"]
    running = await lastword()
    async with httpx.AsyncClient(base_url=running.admin_url) as client:
        for path in paths:
            assert (await client.get(path)).status_code in (200, 503)


def test_pod_outlives_its_streams(overlay: Overlay) -> None:
    """Nothing is killed while it may still be ending streams."""
    pod, _ = overlay.lastword
    assert pod.spec["terminationGracePeriodSeconds"] >= last_seconds(settings_of(overlay))


def test_pods_are_restricted(overlay: Overlay) -> None:
    """Every pod passes the restricted pod security standard, and has no token."""
    for pod in overlay.pods:
        assert pod.spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        for volume in pod.spec.get("volumes", []):
            assert volume.keys() - {"name"} <= VOLUMES
        for container in pod.containers:
            context = pod.spec.get("securityContext", {}) | container["securityContext"]
            assert context["runAsNonRoot"] is True
            assert context["runAsUser"] > 0
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    _, container = overlay.lastword
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_no_service_sets_a_setting(overlay: Overlay) -> None:
    """A Service called lastword sets LASTWORD_PORT to a URL, one called vllm VLLM_PORT."""
    assert all(pod.spec["enableServiceLinks"] is False for pod in overlay.pods)


def test_secrets_are_in_secrets() -> None:
    """The password and the owner secret come from the Secret, and stand nowhere else."""
    gateway = rendered("gateway")
    _, container = gateway.lastword
    environment = gateway.environment(container)
    password = urlsplit(environment["LASTWORD_STORE"]).password
    secrets = {password, environment["LASTWORD_OWNER_SECRET"]}
    assert all(secret and len(secret) == 64 for secret in secrets)
    assert len(secrets) == 2
    assert not any(secret in json.dumps(gateway.objects) for secret in secrets if secret)


def test_sqlite_has_a_writable_volume(overlay: Overlay) -> None:
    """The copies' file lies on a volume with room for the store twice over."""
    pod, container = overlay.lastword
    store = store_of(overlay)
    if not store.startswith("sqlite:"):
        assert store.startswith("redis://")
        assert "volumeMounts" not in container
        return
    (mount,) = container["volumeMounts"]
    assert store.startswith(f"sqlite:{mount['mountPath']}/")
    (volume,) = (item for item in pod.spec["volumes"] if item["name"] == mount["name"])
    if "emptyDir" in volume:
        room = volume["emptyDir"]["sizeLimit"]
    else:
        (claim,) = overlay.of("PersistentVolumeClaim")
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        room = claim["spec"]["resources"]["requests"]["storage"]
        assert pod.spec["securityContext"]["fsGroup"] == pod.spec["securityContext"]["runAsGroup"]
        # One process's file: never two pods, not even for a moment.
        assert pod.workload["spec"]["replicas"] == 1
        assert pod.workload["spec"]["strategy"] == {"type": "Recreate"}
    assert size(room) >= 2 * 2**30


def test_version_is_ours(overlay: Overlay) -> None:
    """The image's tag is this version."""
    _, container = overlay.lastword
    assert container["image"] == f"lastword:{proxy.__version__}"


def test_overlays_run_the_same_container() -> None:
    """What all overlays share is written twice, in base and for the sidecar, and is the same."""
    shared = ("image", "imagePullPolicy", "ports", "resources", *PROBES)
    first, *others = ({key: rendered(name).lastword[1][key] for key in shared} for name in OVERLAYS)
    assert all(other == first for other in others)


def test_gateways_are_ready_without_vllm() -> None:
    """A gateway says itself what is wrong with vLLM; a sidecar's pod waits for its vLLM."""
    needs = {name: settings_of(rendered(name)).ready_needs_upstream for name in OVERLAYS}
    assert needs == {"gateway": False, "gateway-single": False, "sidecar": True}


def test_gateway_holds_together() -> None:
    """Autoscaler and disruption budget are the Deployment's, and one core is the most it uses."""
    gateway = rendered("gateway")
    pod, container = gateway.lastword
    assert "replicas" not in pod.workload["spec"]
    (scaler,) = gateway.of("HorizontalPodAutoscaler")
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", pod.name)
    (metric,) = scaler["spec"]["metrics"]
    assert metric["containerResource"]["container"] == container["name"]
    value = metric["containerResource"]["target"]["averageValue"]
    assert value.endswith("m")
    assert int(value[:-1]) < 1000
    assert scaler["spec"]["minReplicas"] >= 2
    (budget,) = gateway.of("PodDisruptionBudget")
    assert matches(budget["spec"]["selector"], pod)


@pytest.mark.parametrize("name", ["gateway", "gateway-single"])
def test_network_policies_let_pass_what_must(name: str) -> None:
    """A policy that selects the proxy lets it reach names, its upstream and its store."""
    gateway = rendered(name)
    pod, _ = gateway.lastword
    settings = settings_of(gateway)
    (policy,) = (
        item for item in gateway.of("NetworkPolicy") if matches(item["spec"]["podSelector"], pod)
    )
    reached = {
        (selector["podSelector"]["matchLabels"][LABEL], port["port"])
        for rule in policy["spec"]["egress"]
        for selector in rule.get("to", [])
        for port in rule["ports"]
    }
    wanted = {
        (address.hostname, address.port)
        for address in map(urlsplit, (settings.upstream, store_of(gateway)))
        if address.hostname
    }
    assert reached == wanted
    asked = {pod.port(port["port"]) for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert asked == {settings.port, settings.admin_port}


def test_redis_takes_the_proxies_alone() -> None:
    """The Redis of the gateway has the name and port of the store, and lets the proxies in."""
    gateway = rendered("gateway")
    pod, _ = gateway.lastword
    store = urlsplit(store_of(gateway))
    (redis,) = (item for item in gateway.pods if item is not pod and item.name != pod.name)
    (service,) = (
        item for item in gateway.of("Service") if item["metadata"]["name"] == store.hostname
    )
    assert service["spec"]["selector"].items() <= redis.labels.items()
    (port,) = service["spec"]["ports"]
    assert (port["port"], redis.port(port["targetPort"])) == (store.port, store.port)
    (policy,) = (
        item for item in gateway.of("NetworkPolicy") if matches(item["spec"]["podSelector"], redis)
    )
    (rule,) = policy["spec"]["ingress"]
    (peer,) = rule["from"]
    assert matches(peer["podSelector"], pod)
    assert "egress" not in policy["spec"]


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
    upstream = settings_of(sidecar).upstream
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
    port = settings_of(sidecar).admin_port
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
