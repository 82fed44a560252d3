"""Fixtures: a real vLLM, the proxy in front of it as a subprocess, and openai-python on both."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import httpx
import openai
import pytest

from proxy.tools.vllm_process import VllmProcess, find_vllm_python

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOST = "127.0.0.1"
PROXY_START_LIMIT_S = 20.0
PROXY_STOP_LIMIT_S = 10.0


@dataclass(frozen=True)
class Server:
    """Where the vLLM under test answers, and what to say to it."""

    url: str
    model: str
    api_key: str
    ours: bool
    """Whether these tests started it: then it is known to be 0.32.0, with its store, on noise."""

    @property
    def headers(self) -> dict[str, str]:
        """The credentials, as a plain HTTP client sends them."""
        return {"Authorization": f"Bearer {self.api_key}"}


class StartProxy(Protocol):
    """Starts a proxy; it is stopped when the test ends."""

    def __call__(self, *options: str) -> str:
        """Start one with these options of `serve`; return its URL."""


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Give the server that `VLLM_URL` and `VLLM_MODEL` name, else start one."""
    url = os.environ.get("VLLM_URL", "").rstrip("/").removesuffix("/v1")
    if url:
        model = os.environ.get("VLLM_MODEL")
        if not model:
            pytest.fail("VLLM_URL is set: set VLLM_MODEL to the name of a model that it serves.")
        yield Server(url, model, os.environ.get("VLLM_API_KEY") or "none", ours=False)
        return
    python = find_vllm_python()
    if python is None:
        pytest.skip("no vLLM here: `make test-vllm` installs one, VLLM_URL and VLLM_MODEL name one")
    folder = tmp_path_factory.mktemp("vllm")
    with VllmProcess(python, folder / "model", log=folder / "vllm.log") as process:
        yield Server(process.url, process.model, "none", ours=True)


@pytest.fixture(scope="session")
def proxy_url(vllm: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give a proxy that corrects, keeping no copies of its own."""
    with running_proxy(vllm.url, tmp_path_factory.mktemp("proxy") / "proxy.log") as url:
        yield url


@pytest.fixture
def start_proxy(vllm: Server, tmp_path: Path) -> Iterator[StartProxy]:
    """Give a function that starts a further proxy, with options of its own."""
    with ExitStack() as stack:

        def start(*options: str) -> str:
            return stack.enter_context(running_proxy(vllm.url, tmp_path / "proxy.log", *options))

        yield start


@pytest.fixture(scope="session")
def client(vllm: Server, proxy_url: str) -> Iterator[openai.OpenAI]:
    """Give openai-python, talking through the proxy."""
    with openai_client(proxy_url, vllm) as client:
        yield client


@pytest.fixture(scope="session")
def bare(vllm: Server) -> Iterator[openai.OpenAI]:
    """Give openai-python, talking to vLLM itself."""
    with openai_client(vllm.url, vllm) as client:
        yield client


@pytest.fixture(scope="session")
def raw(vllm: Server) -> Iterator[httpx.Client]:
    """Give a plain HTTP client, for whole URLs of either server."""
    with httpx.Client(headers=vllm.headers, timeout=60, trust_env=False) as client:
        yield client


def openai_client(url: str, server: Server) -> openai.OpenAI:
    """Make a client that repeats nothing and goes through no proxy of the environment."""
    http_client = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=server.api_key,
        max_retries=0,
        timeout=60,
        http_client=http_client,
    )


@contextmanager
def running_proxy(upstream: str, log: Path, *options: str) -> Iterator[str]:
    """Run `python -m proxy serve` before `upstream`; gives its URL and ends it with SIGTERM."""
    port, admin_port = _free_ports()
    command = [sys.executable, "-m", "proxy", "serve", "--upstream", upstream, "--host", HOST]
    command += ["--port", str(port), "--admin-port", str(admin_port), "--background", "pass"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LASTWORD_")}
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603
            [*command, *options],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        _wait_until_accepting(process, port, log)
        yield f"http://{HOST}:{port}"
    except BaseException:
        process.kill()
        process.wait()
        raise
    process.terminate()
    try:
        status = process.wait(PROXY_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        pytest.fail(f"The proxy did not end after SIGTERM. Its log:\n{log.read_text()}")
    if status:
        pytest.fail(f"The proxy ended with {status} after SIGTERM. Its log:\n{log.read_text()}")


def _wait_until_accepting(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + PROXY_START_LIMIT_S
    while True:
        try:
            with socket.create_connection((HOST, port), timeout=1):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"The proxy does not listen. Its log:\n{log.read_text()}")
        time.sleep(0.05)


def _free_ports() -> tuple[int, int]:
    # Both are held at once, so that they differ.
    with socket.socket() as one, socket.socket() as other:
        for listener in (one, other):
            listener.bind((HOST, 0))
        return one.getsockname()[1], other.getsockname()[1]
