"""The overlays as kubectl renders them, and what a pod in them is given."""

from __future__ import annotations

import subprocess
from functools import cache
from typing import TYPE_CHECKING, Any

import yaml

from tests.deploy.settings import accepted
from tests.deploy.tools import DEPLOY, tool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from proxy.settings import Settings

__all__ = ["LABEL", "OVERLAYS", "PROBES", "Object", "Overlay", "Pod", "matches", "rendered"]

Object = dict[str, Any]
OVERLAYS = sorted(path.name for path in (DEPLOY / "kubernetes" / "overlays").iterdir())
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
LABEL = "app.kubernetes.io/name"


class Pod:
    """A workload's pod template."""

    def __init__(self, workload: Object) -> None:
        self.name: str = workload["metadata"]["name"]
        self.workload = workload
        template = workload["spec"]["template"]
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.annotations: dict[str, str] = template["metadata"].get("annotations", {})
        self.spec: Object = template["spec"]

    @property
    def containers(self) -> list[Object]:
        """Every container, sidecars too."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def port(self, wanted: str | int) -> int:
        """Return a container port by its name or number; there must be one."""
        (number,) = {
            port["containerPort"]
            for container in self.containers
            for port in container.get("ports", [])
            if wanted in (port["containerPort"], port["name"])
        }
        assert isinstance(number, int)
        return number


class Overlay:
    """Everything that ``kubectl apply -k`` would send."""

    def __init__(self, objects: list[Object], secrets: list[Object]) -> None:
        self.objects = objects
        self.secrets = secrets

    def of(self, *kinds: str) -> Iterator[Object]:
        """Yield the objects of these kinds."""
        return (item for item in self.objects if item["kind"] in kinds)

    @property
    def pods(self) -> list[Pod]:
        """The pod template of every workload."""
        return [Pod(item) for item in self.of("Deployment", "StatefulSet")]

    @property
    def lastword(self) -> tuple[Pod, Object]:
        """The one pod that runs Lastword, and its container there."""
        ((pod, container),) = (
            (pod, container)
            for pod in self.pods
            for container in pod.containers
            if container["name"] == "lastword"
        )
        return pod, container

    @property
    def settings(self) -> Settings:
        """What Lastword makes of its variables; the store's URL is better taken from ``store``."""
        return accepted(self.environment(self.lastword[1]))

    @property
    def store(self) -> str:
        """Where Lastword keeps its copies, its password shown."""
        return self.environment(self.lastword[1])["LASTWORD_STORE"]

    def environment(self, container: Object) -> dict[str, str]:
        """Return the variables that a container gets, those of its Secrets too."""
        given: dict[str, str] = {}
        for source in container.get("envFrom", []):
            given |= self._named("ConfigMap", source["configMapRef"]["name"])["data"]
        for variable in container.get("env", []):
            if "value" in variable:
                given[variable["name"]] = variable["value"]
            else:
                key = variable["valueFrom"]["secretKeyRef"]
                given[variable["name"]] = self._named("Secret", key["name"])["stringData"][
                    key["key"]
                ]
        return given

    def _named(self, kind: str, name: str) -> Object:
        (found,) = (
            item
            for item in [*self.objects, *self.secrets]
            if item["kind"] == kind and item["metadata"]["name"] == name
        )
        return found


@cache
def rendered(name: str) -> Overlay:
    """Render an overlay, beside the Secret that its script makes."""
    folder = DEPLOY / "kubernetes" / "overlays" / name
    script = folder / "secret.sh"
    return Overlay(
        _documents(tool("kubectl"), "kustomize", str(folder)),
        _documents("sh", str(script)) if script.exists() else [],
    )


def matches(selector: Mapping[str, Any], pod: Pod) -> bool:
    """Say whether a label selector, which may not be empty, selects a pod."""
    wanted: dict[str, str] = selector["matchLabels"]
    assert wanted
    return wanted.items() <= pod.labels.items()


def _documents(*command: str) -> list[Object]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own files
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]
