"""Whose a copy is, without keeping the key that says so."""

from __future__ import annotations

import hashlib
import hmac
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Owners"]


class Owners:
    """Turn the headers that tell users apart into a keyed hash.

    ``headers`` are lower-case names.  Requests with none of them share the anonymous owner.
    """

    def __init__(self, headers: Sequence[bytes], secret: bytes) -> None:
        self._headers = tuple(headers)
        self._secret = secret

    def owner_of(self, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """Return the owner's hash in hex; without the secret nothing is learned from it."""
        digest = hmac.new(self._secret, digestmod=hashlib.sha256)
        for wanted in self._headers:
            for name, value in headers:
                if name == wanted:
                    # Lengths keep (a, bc) and (ab, c) apart.
                    digest.update(b"%d:%b%d:%b" % (len(name), name, len(value), value))
        return sys.intern(digest.hexdigest())  # one string for all that an owner has
