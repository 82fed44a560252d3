"""The manifests, rendered: they agree with themselves and with the real settings."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import pytest

import proxy
from tests.deploy.manifests import LABEL, OVERLAYS, PROBES, matches, rendered
from tests.deploy.settings import last_seconds

if TYPE_CHECKING:
    from tests.conftest import StartLastword
    from tests.deploy.manifests import Overlay

VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
UNITS = {"Mi": 2**20, "Gi": 2**30}


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> Overlay:
    """Give each overlay as kubectl renders it."""
    return rendered(request.param)


def size(quantity: str) -> int:
    """Return a quantity's bytes."""
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def test_every_setting_is_one(overlay: Overlay) -> None:
    """Each LASTWORD_ variable is a setting, and its value is accepted."""
    assert overlay.settings.upstream


def test_ports_agree(overlay: Overlay) -> None:
    """What listens, the container's ports, the Service's and the probes' are the same."""
    pod, container = overlay.lastword
    settings = overlay.settings
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
    settings = overlay.settings
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
    assert pod.spec["terminationGracePeriodSeconds"] >= last_seconds(overlay.settings)


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
    """The password of the store and the owner secret are long, new, and in the Secret alone."""
    gateway = rendered("gateway")
    _, container = gateway.lastword
    assert {item["name"] for item in container["env"] if "secretKeyRef" in item["valueFrom"]} == {
        "LASTWORD_STORE",
        "LASTWORD_OWNER_SECRET",
    }
    password = urlsplit(gateway.store).password
    secrets = {password, gateway.environment(container)["LASTWORD_OWNER_SECRET"]}
    assert [len(secret or "") for secret in secrets] == [64, 64]


def test_sqlite_has_a_writable_volume(overlay: Overlay) -> None:
    """The copies' file lies on a volume with room for the store twice over."""
    pod, container = overlay.lastword
    store = overlay.store
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
    needs = {
        name: rendered(name).settings.model_dump()["ready_needs_upstream"] for name in OVERLAYS
    }
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
    settings = gateway.settings
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
        for address in map(urlsplit, (settings.upstream, gateway.store))
        if address.hostname
    }
    assert reached == wanted
    asked = {pod.port(port["port"]) for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert asked == {settings.port, settings.admin_port}


def test_redis_takes_the_proxies_alone() -> None:
    """The Redis of the gateway has the name and port of the store, and lets the proxies in."""
    gateway = rendered("gateway")
    pod, _ = gateway.lastword
    store = urlsplit(gateway.store)
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
