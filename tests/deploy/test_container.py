"""The image and compose.yaml: what can be said of them without an engine that runs them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

import proxy
from tests.deploy.settings import accepted, last_seconds
from tests.deploy.tools import DEPLOY, ROOT, tool
from tests.front import free_port

if TYPE_CHECKING:
    from tests.conftest import StartLastword

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
INSTRUCTIONS = [
    (line.split(None, 1)[0], line.split(None, 1)[1])
    for line in DOCKERFILE.replace("\\\n", " ").splitlines()
    if line and not line.startswith("#")
]


def instruction(name: str) -> str:
    """Return the arguments of an instruction that stands once."""
    (arguments,) = (arguments for found, arguments in INSTRUCTIONS if found == name)
    return arguments


def healthy(environment: dict[str, str]) -> bool:
    """Run the image's health check, as it is written, with this interpreter."""
    command = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
    assert command[0] == "python"
    done = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, *command[1:]], env=environment, capture_output=True, check=False
    )
    return done.returncode == 0


async def test_health_check_follows_the_admin_port(lastword: StartLastword) -> None:
    """It asks the port, and the address, that the admin port is set to."""
    running = await lastword()
    port = str(urlsplit(running.admin_url).port)
    for environment, expected in (
        ({"LASTWORD_ADMIN_PORT": port}, True),
        ({"LASTWORD_ADMIN_PORT": port, "LASTWORD_ADMIN_HOST": "127.0.0.2"}, False),
        ({"LASTWORD_ADMIN_PORT": str(free_port())}, False),
    ):
        assert await asyncio.to_thread(healthy, environment) is expected, environment


def test_image_runs_as_nobody_in_particular() -> None:
    """The user is a number, so that Kubernetes can see that it is not root."""
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", instruction("USER"))
    assert instruction("STOPSIGNAL") == "SIGTERM"
    assert f'org.opencontainers.image.version="{proxy.__version__}"' in instruction("LABEL")


def test_image_settings_are_settings() -> None:
    """What the image sets is accepted, and its ports are the defaults'."""
    given = dict(re.findall(r"(LASTWORD_\w+)=(\S+)", instruction("ENV")))
    settings = accepted({"LASTWORD_UPSTREAM": "http://vllm:8000"} | given)
    assert settings.host == "0.0.0.0"  # noqa: S104 - published by the engine
    assert instruction("EXPOSE").split() == [str(settings.port), str(settings.admin_port)]


def test_context_holds_what_is_copied() -> None:
    """Docker sees nothing of the project but what the image is made of."""
    copied = {
        source.rstrip("/").removeprefix("./")
        for name, arguments in INSTRUCTIONS
        if name == "COPY" and not arguments.startswith("--from")
        for source in arguments.split()[:-1]
    }
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    assert all((ROOT / source).exists() for source in copied)


@pytest.fixture(params=["sqlite", "redis"])
def compose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give compose.yaml as docker compose understands it, with each store."""
    profile = ["--profile", "redis"] if request.param == "redis" else []
    if profile:
        monkeypatch.setenv("LASTWORD_STORE", "redis://redis:6379/0")
        monkeypatch.setenv("LASTWORD_OWNER_SECRET", "0" * 64)
    file = str(DEPLOY / "compose.yaml")
    done = subprocess.run(  # noqa: S603 - our own file
        [tool("docker-compose"), "-f", file, *profile, "config", "--format", "json"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def set_in(service: Any) -> dict[str, str]:
    """Return a service's variables; one without a value is not set."""
    return {name: value for name, value in service["environment"].items() if value is not None}


def test_compose_agrees_with_the_settings(compose: Any) -> None:
    """Every variable is a setting, the port is published, and the store is there."""
    service = compose["services"]["lastword"]
    given = dict(re.findall(r"(LASTWORD_\w+)=(\S+)", instruction("ENV")))
    settings = accepted(given | set_in(service))
    (port,) = service["ports"]
    assert (port["host_ip"], port["target"]) == ("127.0.0.1", settings.port)
    assert urlsplit(settings.upstream).hostname in compose["services"]
    store = service["environment"]["LASTWORD_STORE"]
    scheme, _, place = store.partition(":")
    if scheme == "redis":
        assert urlsplit(store).hostname in compose["services"]
    else:
        (volume,) = service["volumes"]
        assert place.startswith(volume["target"] + "/")
        assert "redis" not in compose["services"]


def test_compose_outlives_its_streams(compose: Any) -> None:
    """Nothing is killed while it may still be ending streams, and nothing else is allowed."""
    service = compose["services"]["lastword"]
    minutes, seconds = re.fullmatch(r"(?:(\d+)m)?(\d+)s", service["stop_grace_period"]).groups()  # type: ignore[union-attr]  # as compose writes it
    assert int(minutes or 0) * 60 + int(seconds) >= last_seconds(accepted(set_in(service)))
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["image"] == f"lastword:{proxy.__version__}"
    assert (ROOT / service["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
