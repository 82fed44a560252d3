"""The secret that keys the owner hash, kept beside the store.

Why beside the store: the hash must be the same after a restart, or nobody finds a copy
again; kept in a file of its own, a stolen database alone tells nothing about keys.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from pathlib import Path

from proxy.store import StoreError

__all__ = ["SECRET_BYTES", "load_secret"]

SECRET_BYTES = 32


def load_secret(store_path: Path | None) -> bytes:
    """Return the secret in ``<store_path>.secret``, made if absent; a fresh one without a path.

    Call it while the store is open: the store's lock keeps a second process from making
    another one at the same time.
    """
    if store_path is None:
        return secrets.token_bytes(SECRET_BYTES)
    path = store_path.with_name(store_path.name + ".secret")
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StoreError(f"The owner secret {path} cannot be read: {error.strerror}.") from error
    try:
        return _make(path)
    except OSError as error:
        raise StoreError(f"The owner secret {path} cannot be made: {error.strerror}.") from error


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        secret = file.read(SECRET_BYTES + 1)
    if mode & 0o077:
        raise StoreError(
            f"The owner secret {path} has mode {mode:04o}, so others may know it: make it"
            " private (chmod 600), or remove it for a new one, after which nobody finds the"
            " copies made so far."
        )
    if len(secret) != SECRET_BYTES:
        raise StoreError(
            f"The owner secret {path} does not hold exactly {SECRET_BYTES} bytes: put it back"
            " from a backup, or remove it for a new one, after which nobody finds the copies"
            " made so far."
        )
    return secret


def _make(path: Path) -> bytes:
    """Write the whole file under another name first: a crash leaves it whole or absent."""
    secret = secrets.token_bytes(SECRET_BYTES)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).replace(path)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)
    return secret


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
