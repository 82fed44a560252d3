"""From the ``store`` setting to the store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.store import Limits, Store, StoreError
from proxy.store.memory import DEFAULT_MAX_BYTES as MEMORY_MAX_BYTES
from proxy.store.memory import MemoryStore
from proxy.store.secret import load_secret
from proxy.store.sqlite import SqliteStore
from proxy.store.sqlite_tables import DEFAULT_MAX_BYTES as SQLITE_MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["open_store", "owner_secret", "store_limit"]


def open_store(
    url: str, limits: Limits | None = None, *, clock: Callable[[], float] = time.time
) -> Store:
    """Open ``memory:`` or ``sqlite:PATH``; raises ``StoreError`` with what to do about it."""
    path = _sqlite_path(url)
    if path is None:
        return MemoryStore(limits, clock=clock)
    return SqliteStore(path, limits, clock=clock)


def store_limit(url: str, limits: Limits) -> int:
    """Tell how many bytes all copies may have together in this store."""
    if limits.max_store_bytes is not None:
        return limits.max_store_bytes
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
    if scheme in {"redis", "rediss"}:
        raise StoreError(
            "The redis store is not built in yet: use sqlite:PATH with one proxy, or memory:."
        )
    raise StoreError(f"The store {url!r} is unknown: use memory: or sqlite:PATH.")
