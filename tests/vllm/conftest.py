"""Fixtures: a real vLLM, the proxy in front of it as a subprocess, and openai-python on both."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Protocol, Self

import httpx
import openai
import pytest

from proxy.tools.vllm_process import VllmProcess, find_vllm_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

HOST = "127.0.0.1"
PATIENCE_S = 180.0
"""The longest that a test waits for anything: a bound, never an expectation.

While a vLLM generates on the CPU, a small virtual machine was seen to stop for 40 s at once.
"""
TIME_LIMIT = pytest.mark.timeout(2 * PATIENCE_S, func_only=True)
"""For a whole test; the starts of vLLM, in fixtures of sessions and modules, have their own."""


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


class LaunchProxy(Protocol):
    """Starts a proxy that a test may end itself; it is stopped at the latest when the test ends."""

    def __call__(self, *options: str, upstream: str | None = None) -> ProxyProcess:
        """Start one with these options of `serve`, before the vLLM under test or another one."""


class ProxyProcess:
    """A proxy as a subprocess, `python -m proxy serve`, which ends when its `with` block does.

    It keeps no copies unless the options say so. Leaving the block sends SIGTERM, which must end it
    with status 0, unless the test has ended it already.
    """

    def __init__(self, upstream: str, log: Path, *options: str) -> None:
        port, admin_port = _free_ports()
        self.url = f"http://{HOST}:{port}"
        self.log = log
        self._port = port
        self._command = [sys.executable, "-m", "proxy", "serve", "--upstream", upstream]
        self._command += ["--host", HOST, "--port", str(port), "--admin-port", str(admin_port)]
        self._command += ["--background", "pass", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LASTWORD_")}
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - the interpreter that the caller chose
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            self._wait_until_accepting(self._process)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is None:
            return
        if error is not None:
            self.kill()
        elif status := self.stop():
            pytest.fail(f"The proxy ended with {status} after SIGTERM. {self._its_log()}")

    def kill(self) -> None:
        """End it with SIGKILL: it gets no moment to store or to say anything."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self) -> None:
        """Send SIGTERM and wait for nothing."""
        assert self._process is not None
        self._process.terminate()

    def stop(self) -> int:
        """Send SIGTERM, wait for the end and return the exit status."""
        self.terminate()
        return self.wait()

    def wait(self) -> int:
        """Wait for the end that was asked for and return the exit status."""
        assert self._process is not None
        try:
            status = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"The proxy did not end after SIGTERM. {self._its_log()}")
        self._process = None
        return status

    def _wait_until_accepting(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with socket.create_connection((HOST, self._port), timeout=PATIENCE_S):
                    return
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"The proxy does not listen. {self._its_log()}")
            time.sleep(0.05)

    def _its_log(self) -> str:
        return f"Its log:\n{self.log.read_text()}"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of the tiny model, which the first vLLM that is started here makes."""
    return tmp_path_factory.mktemp("model") / "tiny"


@pytest.fixture(scope="session")
def vllm(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
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
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with VllmProcess(python, model_dir, log=log) as process:
        yield Server(process.url, process.model, "none", ours=True)


@pytest.fixture(scope="module")
def storeless_vllm(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Give a vLLM, always one of ours, that was started without its store of responses."""
    log = tmp_path_factory.mktemp("storeless") / "vllm.log"
    with VllmProcess(_python_of_our_own(), model_dir, store=False, log=log) as process:
        yield Server(process.url, process.model, "none", ours=True)


@pytest.fixture(scope="module")
def mortal_vllm(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    """Give a vLLM, always one of ours, whose processes the tests of one file may kill."""
    log = tmp_path_factory.mktemp("mortal") / "vllm.log"
    with VllmProcess(_python_of_our_own(), model_dir, log=log) as process:
        yield process


@pytest.fixture(scope="session")
def proxy_url(vllm: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give a proxy that corrects, keeping no copies of its own."""
    with ProxyProcess(vllm.url, tmp_path_factory.mktemp("proxy") / "proxy.log") as proxy:
        yield proxy.url


@pytest.fixture
def launch_proxy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LaunchProxy]:
    """Give a function that starts a further proxy, with options of its own."""
    with ExitStack() as stack:
        logs = count()

        def launch(*options: str, upstream: str | None = None) -> ProxyProcess:
            if upstream is None:
                server: Server = request.getfixturevalue("vllm")
                upstream = server.url
            log = tmp_path / f"proxy-{next(logs)}.log"
            return stack.enter_context(ProxyProcess(upstream, log, *options))

        yield launch


@pytest.fixture
def start_proxy(launch_proxy: LaunchProxy) -> StartProxy:
    """Give a function that starts a further proxy, of which only the URL matters."""

    def start(*options: str) -> str:
        return launch_proxy(*options).url

    return start


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
    with httpx.Client(headers=vllm.headers, timeout=PATIENCE_S, trust_env=False) as client:
        yield client


def until(predicate: Callable[[], bool]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not predicate():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.05)


def openai_client(url: str, server: Server) -> openai.OpenAI:
    """Make a client that repeats nothing and goes through no proxy of the environment."""
    http_client = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=server.api_key,
        max_retries=0,
        timeout=PATIENCE_S,
        http_client=http_client,
    )


def _python_of_our_own() -> str:
    """Return the interpreter for a vLLM that must be ours, whatever `VLLM_URL` says."""
    python = find_vllm_python()
    if python is None:
        pytest.skip("this needs a vLLM of its own: `make vllm` installs one")
    return python


def _free_ports() -> tuple[int, int]:
    # Both are held at once, so that they differ.
    with socket.socket() as one, socket.socket() as other:
        for listener in (one, other):
            listener.bind((HOST, 0))
        return one.getsockname()[1], other.getsockname()[1]
