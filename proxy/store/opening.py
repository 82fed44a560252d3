"""From the ``store`` setting to the store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.addresses import REDIS_SCHEMES
from proxy.store import Limits, Store, StoreError
from proxy.store.memory import DEFAULT_MAX_BYTES as MEMORY_MAX_BYTES
from proxy.store.memory import MemoryStore
from proxy.store.secret import load_secret
from proxy.store.shared import DEFAULT_MAX_BYTES as SHARED_MAX_BYTES
from proxy.store.sqlite import SqliteStore
from proxy.store.sqlite_tables import DEFAULT_MAX_BYTES as SQLITE_MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["open_store", "owner_secret", "store_limit"]


def open_store(
    url: str,
    limits: Limits | None = None,
    *,
    clock: Callable[[], float] | None = None,
    prefix: str = "lastword:",
    lease_s: float = 10.0,
) -> Store:
    """Open ``memory:``, ``sqlite:PATH`` or ``redis://…``; raises ``StoreError`` with what to do.

    ``prefix`` and ``lease_s`` are for stores that several processes share.
    """
    if url.partition(":")[0] in REDIS_SCHEMES:
        try:
            from proxy.store.redis import RedisStore  # noqa: PLC0415 - an extra of its own
        except ImportError as error:
            raise StoreError(
                "The redis store needs a client that is not installed:"
                " install Lastword with its extra redis (pip install '.[redis]' in its folder)."
            ) from error
        return RedisStore(url, limits, prefix=prefix, lease_s=lease_s, clock=clock)
    path = _sqlite_path(url)
    if path is None:
        return MemoryStore(limits, clock=clock or time.time)
    return SqliteStore(path, limits, clock=clock or time.time)


def store_limit(url: str, limits: Limits) -> int:
    """Tell how many bytes all copies may have together in this store."""
    if limits.max_store_bytes is not None:
        return limits.max_store_bytes
    if url.partition(":")[0] in REDIS_SCHEMES:
        return SHARED_MAX_BYTES
    return MEMORY_MAX_BYTES if _sqlite_path(url) is None else SQLITE_MAX_BYTES


def owner_secret(url: str) -> bytes:
    """Return the owner-hash secret that belongs to the store, while that store is open.

    ``memory:`` has a new one on each call, so ask once per process.
    """
    return load_secret(_sqlite_path(url))


def _sqlite_path(url: str) -> Path | None:
    """Return the database's path, None for ``memory:``; refuse what is neither."""
    scheme, _, rest = url.partition(":")
    if scheme == "memory" and not rest:
        return None
    if scheme == "sqlite" and rest:
        if rest.startswith("//") and not rest.startswith("///"):
            raise StoreError(
                f"The store {url!r} reads like a host name: write sqlite:PATH, for example"
                " sqlite:/var/lib/lastword/copies.db."
            )
        return Path(rest).expanduser().absolute()
    raise StoreError(f"The store {url!r} is unknown: use memory:, sqlite:PATH or redis://HOST.")
