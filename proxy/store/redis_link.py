"""The way to the Redis server: a few connections, time limits, and whether it is there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import hiredis
import structlog
from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    NoScriptError,
    RedisError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)

from proxy.store import StoreError, StoreUnavailableError
from proxy.store.redis_scripts import SCRIPTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.typing import EncodableT

__all__ = ["ANSWER_S", "Call", "Link", "stop"]

ANSWER_S = 3.0
"""How long the server may take for an answer, or to be reached, until it counts as away."""

_CONNECTIONS = 8
_TELL_AGAIN_S = 10.0
"""A server may take reads and refuse writes, by turns: the log needs not hear of every turn."""

_OLDEST = (6, 2)

log = structlog.stdlib.get_logger("lastword")

Call = tuple[str, "Sequence[bytes]", "Sequence[bytes | str | int | float]"]
"""A script's name, its keys, its arguments."""


class Link:
    """Connections to one server; whatever is wrong with it is ``StoreUnavailableError``.

    ``up`` says whether it answered when it was last asked, ``up_since`` (the loop's time) since
    when it has without fail.  Neither a message nor a log line of this class holds the URL.
    """

    def __init__(self, url: str) -> None:
        try:
            self._pool = _pool(url, _CONNECTIONS, ANSWER_S)
            self._url = url
        except ValueError as error:
            raise StoreError(f"The address of the Redis server cannot be read: {error}") from error
        self._redis = Redis(connection_pool=self._pool)
        self._closed = False
        self._told_at = float("-inf")  # the loop's time
        self.up = True
        self.up_since: float | None = None

    def blocking_client(self, block_s: float) -> Redis:
        """Open a connection of its own for reads that block for up to ``block_s``."""
        return Redis(connection_pool=_pool(self._url, 1, block_s + ANSWER_S))

    async def check(self) -> None:
        """See that the server will do; raises ``StoreError`` with what to do if it will not."""
        try:
            server = await self._ask("INFO", "server")
            cluster = await self._ask("INFO", "cluster")
            memory = await self._ask("INFO", "memory")
        except StoreUnavailableError as error:
            if isinstance(error.__cause__, AuthenticationError | NoPermissionError):
                raise StoreError(f"The Redis server refuses: {error.__cause__}.") from error
            log.warning("the store is away; it is tried again", error=str(error))
            return
        version = str(server.get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
            raise StoreError(f"The Redis server is {version}: 6.2 or newer is needed, or Valkey.")
        if cluster.get("cluster_enabled"):
            raise StoreError(
                "The Redis server is part of a cluster, which is not supported: use one primary"
                " (with replicas, if you like)."
            )
        policy = memory.get("maxmemory_policy")
        if memory.get("maxmemory") and policy != "noeviction":
            log.warning(
                "the Redis server evicts keys when its memory is full, so copies may vanish:"
                " set maxmemory-policy to noeviction",
                policy=policy,
            )

    async def run(
        self, script: str, keys: Sequence[bytes], args: Sequence[bytes | str | int | float]
    ) -> Any:
        """Run one script and return its answer."""
        (answer,) = await self.run_all([(script, keys, args)])
        if isinstance(answer, StoreUnavailableError):
            raise answer
        return answer

    async def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one round trip; what one of them met stands in its answer's place."""
        answers = await self._pipeline(calls)
        unknown = [n for n, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:  # the server is a new one, or was told to forget its scripts
            for name in {calls[n][0] for n in unknown}:
                await self._ask("SCRIPT", "LOAD", SCRIPTS[name].text)
            again = await self._pipeline([calls[n] for n in unknown])
            for place, answer in zip(unknown, again, strict=True):
                answers[place] = answer
        return [_failed(a) if isinstance(a, Exception) else a for a in answers]

    async def add(self, stream: bytes, *, lasts_s: float) -> None:
        """Add an entry to a stream that holds one and vanishes by itself."""
        await self._ask("XADD", stream, "MAXLEN", 1, "*", "x", "")
        await self._ask("PEXPIRE", stream, int(lasts_s * 1000))

    async def ask(self, *command: bytes | str | int) -> Any:
        """Run one command and return its answer."""
        return await self._ask(*command)

    async def aclose(self) -> None:
        """Close all connections."""
        self._closed = True
        await self._redis.aclose()
        await self._pool.disconnect()

    def went_down(self, error: Exception) -> StoreUnavailableError:
        """Note that the server is away, and say so."""
        now = asyncio.get_running_loop().time()
        if self.up and not self._closed and now - self._told_at > _TELL_AGAIN_S:
            self._told_at = now
            log.warning("the store is away, or takes no writes", error=_sentence(error))
        self.up = False
        self.up_since = None
        return _failed(error)

    def came_up(self) -> None:
        """Note that the server has answered."""
        self.up = True
        if self.up_since is None:
            self.up_since = asyncio.get_running_loop().time()

    async def _ask(self, *command: bytes | str | int) -> Any:
        self._check_open()
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
        except (RedisError, OSError, TimeoutError) as error:
            raise self.went_down(error) from error
        self.came_up()
        return answer

    async def _pipeline(self, calls: Sequence[Call]) -> list[Any]:
        self._check_open()
        pipeline = self._redis.pipeline(transaction=False)
        for script, keys, args in calls:
            pipeline.execute_command("EVALSHA", SCRIPTS[script].sha, len(keys), *keys, *args)
        try:
            async with asyncio.timeout(ANSWER_S):
                answers = await pipeline.execute(raise_on_error=False)
        except (RedisError, OSError, TimeoutError) as error:
            raise self.went_down(error) from error
        refused = [
            a for a in answers if isinstance(a, Exception) and not isinstance(a, NoScriptError)
        ]
        if refused:
            self.went_down(refused[0])
        else:
            self.came_up()
        return answers

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError("The store is closed: the proxy is shutting down.")


async def stop(*tasks: asyncio.Task[None] | None) -> None:
    """Cancel tasks that use a link, until they have ended.

    The client may swallow a cancellation that comes while it connects.
    """
    left = {task for task in tasks if task is not None}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.1)


def _pool(url: str, connections: int, answer_s: float) -> BlockingConnectionPool:
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=ANSWER_S,
        socket_timeout=answer_s,
        socket_connect_timeout=ANSWER_S,
        # A dead connection is found, and made again, by its next use.
        retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        protocol=2,
    )
    secure = pool.connection_class is SSLConnection
    pool.connection_class = _SecureConnection if secure else _PlainConnection
    return pool


def _pack(_: object, *args: EncodableT) -> list[bytes]:
    """Write a command in C: it takes a fifth of the time."""
    return [hiredis.pack_command(args)]  # type: ignore[arg-type]  # says a pair, means any tuple


class _PlainConnection(Connection):
    pack_command = _pack


class _SecureConnection(SSLConnection):
    pack_command = _pack


def _failed(error: Exception) -> StoreUnavailableError:
    return StoreUnavailableError(f"The Redis server does not serve now: {_sentence(error)}")


def _sentence(error: Exception) -> str:
    text = str(error).strip().rstrip(".") or type(error).__name__
    return f"{text}."
