"""Errors of the proxy's own, in OpenAI's shape.

LastwordError
 ├─ SettingsError          what was asked for at start cannot be; the sentence says what can
 ├─ OriginError            a fault of ours: a request was about to leave the one upstream
 └─ RequestError           a request that the proxy answers itself, with a status
     ├─ BadRequestError     4xx, 505, 508: the client's request as it stands
     ├─ FullError           503: a limit of the proxy is reached; the same request may pass later
     └─ UpstreamError       502, 503, 504: upstream, or the proxy, cannot serve it now
"""

from __future__ import annotations

import json
from typing import Literal

__all__ = [
    "BadRequestError",
    "FullError",
    "LastwordError",
    "OriginError",
    "RequestError",
    "SettingsError",
    "UpstreamError",
    "UpstreamTrouble",
    "error_body",
    "own_fault",
]

_SERVER_ERROR = 500


class LastwordError(Exception):
    """The root of all errors that the proxy raises itself."""


class SettingsError(LastwordError):
    """A setting is wrong or things do not fit together; the message says what is allowed."""


class OriginError(LastwordError):
    """A request was about to name another place than the upstream; it was not sent."""


class RequestError(LastwordError):
    """A request that the proxy answers itself: ``status`` and an OpenAI-shaped body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers

    def body(self) -> bytes:
        """Return the JSON body that says what happened and what to do."""
        return error_body(self.status, self.message, self.param)


class BadRequestError(RequestError):
    """The request cannot be passed on as it stands."""


class FullError(RequestError):
    """The proxy has as much at hand as the setting ``limit`` allows: 503, to be tried again."""

    def __init__(self, limit: str) -> None:
        super().__init__(
            503,
            f"This proxy is at its limit ({limit}); try again in a moment.",
            headers=((b"retry-after", b"1"),),
        )
        self.limit = limit


UpstreamTrouble = Literal[
    "refused", "connect_timeout", "dns", "tls", "unreachable", "files", "no_answer", "broken"
]
"""Why upstream could not be asked: no connection (``files``: too many are open here), no head of an
answer in time, or anything else."""


class UpstreamError(RequestError):
    """Upstream could not be asked or gave no usable answer; ``kind`` says why in a word."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: UpstreamTrouble = "broken",
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(status, message, headers=headers)
        self.kind = kind


def own_fault() -> RequestError:
    """Return the answer to a request that met a fault of ours; the log has the rest."""
    return RequestError(500, "The proxy failed; its log says why. This is a fault in Lastword.")


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Write an error as vLLM and OpenAI do: ``{"error": {message, type, param, code}}``."""
    kind = "server_error" if status >= _SERVER_ERROR else "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": status}
    return json.dumps({"error": error}, ensure_ascii=False, separators=(",", ":")).encode()
