"""What the scripts answer, read as the words of the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.store import CopyInfo, CopyLostError, Gone, StoreFullError, Tombstone
from proxy.store.room import copy_full, store_full
from proxy.store.shared import LeaseLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.store import CopyKey

__all__ = ["full", "lost", "read_found", "read_info"]


def read_info(key: CopyKey, told: Sequence[bytes]) -> CopyInfo:
    """Read what a script tells of a copy."""
    meta, snapshot, created_at, ended_at, last_number, blocks, size = told
    return CopyInfo(
        key=key,
        meta=meta,
        snapshot=snapshot,
        created_at=float(created_at),
        ended_at=float(ended_at) if ended_at else None,
        last_number=int(last_number),
        blocks=int(blocks),
        size=int(size),
    )


def read_found(key: CopyKey, answer: Sequence[Any]) -> CopyInfo | Tombstone | None:
    """Read what ``get.lua`` answers."""
    if not answer:
        return None
    if answer[0] == b"copy":
        return read_info(key, answer[1])
    reason, _, at = answer[1].decode().partition(":")
    return Tombstone(key, Gone(reason), float(at))


def full(answer: Sequence[bytes], max_copy_bytes: int, max_store_bytes: int) -> StoreFullError:
    """Say which limit an answer tells of."""
    size = int(answer[1])
    if answer[0] == b"copy_full":
        return copy_full(size, max_copy_bytes)
    return store_full(size, max_store_bytes)


def lost(key: CopyKey, answer: Sequence[bytes]) -> CopyLostError:
    """Say why a writer was refused."""
    response_id = key.response_id
    match answer[0]:
        case b"taken":
            return LeaseLostError(f"Another replica writes the copy of {response_id} now.")
        case b"absent":
            what = "is not there (was the store restarted or flushed?)"
        case b"ended":
            what = "has ended"
        case _:
            what = f"holds {int(answer[1])} blocks, not what its writer says"
    return CopyLostError(f"The copy of {response_id} {what}: its writer must stop writing.")
