"""Whether a copy may grow: the two refusals that an operator can do something about."""

from __future__ import annotations

from proxy.store import StoreFullError

__all__ = ["check_copy_room", "check_store_room", "copy_full", "store_full"]


def copy_full(size: int, max_copy_bytes: int) -> StoreFullError:
    """Say that one copy would be too large."""
    return StoreFullError(
        f"The copy would hold {size} bytes, max_copy_bytes allows {max_copy_bytes}: it is not"
        " kept. Raise max_copy_bytes to keep it."
    )


def store_full(size: int, max_store_bytes: int) -> StoreFullError:
    """Say that all copies together would be too large."""
    return StoreFullError(
        f"All copies together would hold {size} bytes, max_store_bytes allows {max_store_bytes},"
        " and too little of it has ended: the copy is not kept. Raise max_store_bytes or lower"
        " copy_ttl_s."
    )


def check_copy_room(size: int, max_copy_bytes: int) -> None:
    """Raise ``StoreFullError`` for a copy that would have more than ``max_copy_bytes``."""
    if size > max_copy_bytes:
        raise copy_full(size, max_copy_bytes)


def check_store_room(size: int, max_store_bytes: int, *, ended_size: int) -> None:
    """Raise ``StoreFullError`` if all copies would have more than ``max_store_bytes``.

    ``ended_size`` are the bytes of those that have ended and can go.
    """
    if size - max_store_bytes > ended_size:
        raise store_full(size, max_store_bytes)
