"""Leave some open files for what must go on when clients take all: admin port, vLLM, store."""

from __future__ import annotations

import resource
import time
from typing import Protocol

import structlog

__all__ = ["OpenFiles"]

KEPT_FILES = 16
_TELL_AGAIN_S = 10.0

log = structlog.stdlib.get_logger("lastword")


class _Socket(Protocol):
    def fileno(self) -> int:
        """Tell its number: the system gives the lowest that is free."""


class OpenFiles:
    """Refuses clients' connections that come when hardly any files are left, and says so."""

    def __init__(self) -> None:
        self._limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._refused = 0
        self._told_at = float("-inf")

    def refuses(self, connection: _Socket) -> bool:
        """Whether a connection that was accepted just now must be closed again."""
        if self._limit == resource.RLIM_INFINITY or (
            connection.fileno() < self._limit - KEPT_FILES
        ):
            return False
        self._refused += 1
        now = time.monotonic()
        if now - self._told_at > _TELL_AGAIN_S:
            self._told_at = now
            log.warning(
                "connections are closed at once, since open files are used up; raise the limit"
                " (ulimit -n, LimitNOFILE)",
                open_files=self._limit,
                closed_so_far=self._refused,
            )
        return True
