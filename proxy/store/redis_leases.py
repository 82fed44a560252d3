"""The leases and claims that this process holds, renewed for as long as they are held."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

import structlog

from proxy.store import Gone, StoreUnavailableError
from proxy.store.redis_keys import from_member
from proxy.store.redis_link import stop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.store import CopyKey
    from proxy.store.redis_keys import Keys
    from proxy.store.redis_link import Call, Link

__all__ = ["Leases"]

_RENEWED_AT_ONCE = 200

log = structlog.stdlib.get_logger("lastword")


class Leases:
    """Tokens by member; each lease that is taken has a token of its own.

    ``doomed`` copies could not be written to the end and are dropped as soon as the server is back.
    ``drop_call`` makes the call that drops one, for its token.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        *,
        lease_s: float,
        now: Callable[[], float | str],
        drop_call: Callable[[bytes, Gone, str], Call],
    ) -> None:
        self._link = link
        self._keys = keys
        self._lease_s = lease_s
        self._now = now
        self._drop_call = drop_call
        self._process = secrets.token_hex(8)
        self._number = count()
        self._tokens: dict[bytes, str] = {}
        self._claims: dict[bytes, str] = {}
        self._doomed: dict[bytes, str] = {}
        self._tried_at: float | None = None  # the loop's time
        self._task: asyncio.Task[None] | None = None
        self.on_lost: Callable[[CopyKey], None] | None = None

    @property
    def held(self) -> int:
        """How many copies this process writes."""
        return len(self._tokens)

    @property
    def overdue(self) -> bool:
        """Whether leases may have run out unseen: this process stood still.

        It did if it has not even tried to renew them.  What the link says of the server does not
        count: all that waited for an answer has timed out when the process goes on.
        """
        now = asyncio.get_running_loop().time()
        return self._tried_at is not None and now - self._tried_at > self._lease_s

    def new_token(self) -> str:
        """Make a token that nobody else has."""
        return f"{self._process}-{next(self._number)}"

    def token(self, member: bytes) -> str:
        """Give the token of a copy that this process writes; "-", which fits none, of another."""
        return self._tokens.get(member, "-")

    def hold(self, member: bytes, token: str) -> None:
        """Keep a lease that was given."""
        self._tokens[member] = token
        self._claims.pop(member, None)

    def let_go(self, member: bytes) -> str | None:
        """Renew a lease no longer; return its token."""
        return self._tokens.pop(member, None)

    def doom(self, member: bytes) -> None:
        """Drop a copy that this process writes as soon as the server takes it."""
        token = self.let_go(member)
        if token is not None:
            self._doomed[member] = token

    def claim(self, member: bytes, token: str) -> None:
        """Keep a claim that was given."""
        self._claims[member] = token

    def let_go_of_claim(self, member: bytes) -> str | None:
        """Renew a claim no longer; return its token."""
        return self._claims.pop(member, None)

    def start(self) -> None:
        """Begin to renew."""
        self._tried_at = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._keep())  # noqa: TID251 - awaited by aclose

    async def aclose(self) -> list[tuple[bytes, str]]:
        """Renew no more; return the leases that are left, by member."""
        await stop(self._task)
        with suppress(StoreUnavailableError):
            await self._drop_doomed()
            if self._claims:
                claims = list(self._claims.items())
                keys = [self._keys.claim(member) for member, _ in claims]
                await self._link.run("unclaim", keys, [token for _, token in claims])
        left = list(self._tokens.items())
        self._tokens.clear()
        self._claims.clear()
        return left

    async def renew(self) -> None:
        """Renew what is held, once; tell of leases that others have taken."""
        began_at = asyncio.get_running_loop().time()
        try:
            await self._drop_doomed()
            await self._renew_held()
        finally:
            self._tried_at = began_at

    def lost(self, member: bytes, token: str) -> None:
        """Let go of a lease that another process has taken, and tell."""
        if self._tokens.get(member) == token:
            del self._tokens[member]
            log.warning(
                "another replica has taken a run over", copy=from_member(member).response_id
            )
            if self.on_lost is not None:
                self.on_lost(from_member(member))

    async def _renew_held(self) -> None:
        leases = [(self._keys.copy(m), m, token) for m, token in self._tokens.items()]
        claims = [(self._keys.claim(m), b"", token) for m, token in self._claims.items()]
        for start in range(0, len(leases) + len(claims), _RENEWED_AT_ONCE):
            some = (leases + claims)[start : start + _RENEWED_AT_ONCE]
            keys = [self._keys.open, *(key for key, _, _ in some)]
            args: list[bytes | str | float] = [self._now(), self._lease_s]
            args.append(int(self._lease_s * 1000))
            for _, member, token in some:
                args += (member, token)
            lost: Sequence[int] = await self._link.run("renew", keys, args)
            for place in lost:
                _, member, token = some[place - 1]
                self.lost(member, token)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            with suppress(StoreUnavailableError):  # the link has told; it is tried again
                await self.renew()

    async def _drop_doomed(self) -> None:
        for member, token in list(self._doomed.items()):
            await self._link.run(*self._drop_call(member, Gone.DROPPED, token))
            del self._doomed[member]
