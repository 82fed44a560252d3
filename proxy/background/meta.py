"""What a copy is kept with beside its events, and which ids may be asked for."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import msgspec

from proxy.background.run import RunMode
from proxy.errors import BadRequestError

if TYPE_CHECKING:
    from proxy.store import CopyInfo

__all__ = [
    "OBJECT",
    "RESPONSE_ID",
    "Meta",
    "check_same",
    "digest_of",
    "is_object",
    "not_found",
    "read_meta",
]

RESPONSE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
OBJECT = "object"


class Meta(msgspec.Struct, frozen=True):
    """What a copy is kept with: who made it go on, and the body it was asked for with.

    ``mode`` is a ``RunMode``, or ``OBJECT`` for a response that vLLM keeps itself: only its owner
    is known here.
    """

    mode: str
    body: str = ""
    path: str = ""

    @property
    def run_mode(self) -> RunMode:
        """Who makes the response; ``OBJECT`` has none."""
        return RunMode(self.mode)

    def encode(self) -> bytes:
        """Write it as a store keeps it."""
        return msgspec.json.encode(self)


read_meta = msgspec.json.Decoder(Meta).decode


def is_object(info: CopyInfo) -> bool:
    """Whether vLLM keeps the response itself, and only its owner is known here."""
    return read_meta(info.meta).mode == OBJECT


def digest_of(body: bytes) -> str:
    """Return what is kept of a request's body, to know it again."""
    return hashlib.sha256(body).hexdigest()


def check_same(known: str, digest: str) -> None:
    """Check that a run was asked for with the same body; raises ``BadRequestError``."""
    if known != digest:
        raise BadRequestError(
            400,
            "A response with this request_id exists already, and it was asked for with another"
            " body. Send the same body to follow it, or choose another request_id.",
            param="request_id",
        )


def not_found(response_id: str) -> BadRequestError:
    """The 404 of an unknown id, in vLLM's words."""
    return BadRequestError(404, f"Response with id '{response_id}' not found.", param="response_id")
