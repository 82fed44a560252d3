"""Which requests carry a Responses event stream, and how the client wants it treated."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from proxy.core.corrector import Mode
from proxy.errors import BadRequestError
from proxy.upstream.headers import values

if TYPE_CHECKING:
    from proxy.upstream.headers import Pairs

__all__ = ["CORRECT_HEADER", "ResponsesRoutes", "requested_mode"]

CORRECT_HEADER = b"lastword-correct"
# vLLM's routes that a log line names; all others are "other", since a path is the client's word.
_FIXED_ROUTES = frozenset(
    {
        *("/health", "/metrics", "/ping", "/tokenize", "/detokenize", "/version"),
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages"),
        *("/v1/models", "/v1/responses"),
    }
)


class ResponsesRoutes:
    """The routes of responses, behind ``path_prefix``.

    Paths are matched percent-decoded, as vLLM's router does.
    """

    def __init__(self, path_prefix: str = "") -> None:
        self._prefix = path_prefix
        base = re.escape(path_prefix) + "/v1/responses"
        self._create = re.compile(base)
        self._retrieve = re.compile(base + "/([^/]+)")
        self._cancel = re.compile(base + "/([^/]+)/cancel")

    def template(self, path: str) -> str:
        """The route's name for people, without ``path_prefix``: never what a client may choose."""
        if path.startswith(self._prefix) and path[len(self._prefix) :] in _FIXED_ROUTES:
            return path[len(self._prefix) :]
        if self._retrieve.fullmatch(path):
            return "/v1/responses/{id}"
        if self._cancel.fullmatch(path):
            return "/v1/responses/{id}/cancel"
        return "other"

    def is_create(self, method: str, path: str) -> bool:
        """Whether this is ``POST /v1/responses``."""
        return method == "POST" and self._create.fullmatch(path) is not None

    def retrieve_id(self, method: str, path: str) -> str | None:
        """The id if this is ``GET /v1/responses/{id}``."""
        match = self._retrieve.fullmatch(path) if method == "GET" else None
        return match[1] if match else None

    def cancel_id(self, method: str, path: str) -> str | None:
        """The id if this is ``POST /v1/responses/{id}/cancel``."""
        match = self._cancel.fullmatch(path) if method == "POST" else None
        return match[1] if match else None

    def delete_id(self, method: str, path: str) -> str | None:
        """The id if this is ``DELETE /v1/responses/{id}``."""
        match = self._retrieve.fullmatch(path) if method == "DELETE" else None
        return match[1] if match else None


def requested_mode(headers: Pairs, default: Mode) -> Mode:
    """Return what ``Lastword-Correct`` asks for, the last one if repeated.

    Raises ``BadRequestError`` (400) for a value that does not exist.
    """
    given = values(headers, CORRECT_HEADER)
    if not given:
        return default
    try:
        return Mode(given[-1].strip().decode("latin-1").lower())
    except ValueError as error:
        raise BadRequestError(
            400, "The header Lastword-Correct must be on, observe or off.", param="Lastword-Correct"
        ) from error
