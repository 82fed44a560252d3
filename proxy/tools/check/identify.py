"""Find out what answers at an address: whether it can be asked at all, its version, its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import msgspec

from proxy.tools.check.report import CheckError, NotAskedError, printable

if TYPE_CHECKING:
    from proxy.tools.check.server import Server

__all__ = ["choose_model", "read_version"]


class _Version(msgspec.Struct):
    version: str


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_version = msgspec.json.Decoder(_Version)
_models = msgspec.json.Decoder(_Models)
_NO_KEY = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


async def read_version(server: Server) -> str | None:
    """Return what vLLM's ``/version`` says; None where there is no such thing."""
    try:
        reply = await server.get("/version")
    except NotAskedError as error:
        raise CheckError(f"{server.url} cannot be asked: {error}") from error
    if reply.status != httpx.codes.OK:
        return None
    try:
        return printable(_version.decode(reply.body).version)
    except msgspec.MsgspecError:
        return None


async def choose_model(server: Server, asked_for: str | None) -> None:
    """Set the server's model: the one that was asked for, or the first that it lists.

    Raises ``CheckError`` where that cannot be known, where the server wants a key, and where it
    does not have the model.
    """
    try:
        reply = await server.get("/v1/models")
    except NotAskedError as error:
        raise CheckError(f"{server.url} cannot be asked: {error}") from error
    if reply.status in _NO_KEY:
        raise CheckError(
            f"{server.url} answers {reply.status}: it wants a key. Give it with --api-key,"
            " VLLM_API_KEY, OPENAI_API_KEY or --header."
        )
    models = _read_models(server, reply.status, reply.body, listed=asked_for is None)
    named = [model for model in models if asked_for in (None, model.id)]
    if models and not named:
        names = ", ".join(printable(model.id) for model in models[:10])
        raise CheckError(f"--model: {server.url} has no model {asked_for}; it has {names}")
    server.model = asked_for or named[0].id
    if named and named[0].max_model_len:
        server.long_answer_tokens = min(server.long_answer_tokens, named[0].max_model_len // 2)


def _read_models(server: Server, status: int, body: bytes, *, listed: bool) -> list[_Model]:
    """Return the models that the server lists; none if it has no list and need not have one."""
    try:
        models = _models.decode(body).data if status == httpx.codes.OK else []
    except (msgspec.MsgspecError, RecursionError):
        models = []
    if listed and not models:
        raise CheckError(
            f"{server.url} does not look like a vLLM: GET /v1/models gives no list of models"
            f" (status {status}). If it has none, name one with --model."
        )
    return models
