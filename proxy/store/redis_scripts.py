"""The scripts that run inside Redis: each is one step that no other client can come between."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

__all__ = ["SCRIPTS", "Script"]


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text, and the name that Redis knows it by."""

    text: bytes
    sha: str


def _load(name: str, *, of_a_copy: bool = True) -> Script:
    lua = files("proxy.store") / "lua"
    text = (lua / f"{name}.lua").read_bytes()
    if of_a_copy:
        text = (lua / "copy.lua").read_bytes() + text
    return Script(text, hashlib.sha1(text, usedforsecurity=False).hexdigest())


_OF_A_COPY = (
    *("append", "cancel", "claim", "create", "drop", "end", "get", "index", "look", "read"),
    *("release", "stones", "take"),
)
_OF_MANY = ("late", "renew", "unclaim")

SCRIPTS = {name: _load(name) for name in _OF_A_COPY} | {
    name: _load(name, of_a_copy=False) for name in _OF_MANY
}
