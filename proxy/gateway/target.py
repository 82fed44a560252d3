"""Which request targets may go up: origin form, to the one origin, without detours."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from proxy.errors import BadRequestError

__all__ = ["check_target"]

# A target in which none of these stands passes: most are judged by this one search.
_SUSPECT = re.compile(rb"[^!-~]|[#%\\]|/\.|\A//|\A(?!/)")
_FORBIDDEN = re.compile(rb"[^!-~]|[#\\]")
_FORBIDDEN_DECODED = re.compile(rb"[\x00-\x1f\x7f\\]")


def check_target(target: bytes) -> None:
    """Refuse a target that could mean another place upstream than it says.

    Absolute and authority form, ``//`` at the start, dot segments, backslashes and control
    bytes, plain or percent-encoded, are 400 (``BadRequestError``).  An encoded slash is part
    of its segment and passes.  RFC 9112, section 3.2; RFC 3986, section 5.2.4.
    """
    if not _SUSPECT.search(target):
        return
    if not target.startswith(b"/"):
        raise _refused("it must be a path; this proxy serves one upstream only")
    if target.startswith(b"//"):
        raise _refused("it must not begin with two slashes")
    if _FORBIDDEN.search(target):
        raise _refused("control bytes, bytes above 127, backslashes and # are not allowed in it")
    decoded = unquote_to_bytes(target.partition(b"?")[0])
    if _FORBIDDEN_DECODED.search(decoded):
        raise _refused("encoded control bytes and backslashes are not allowed in it")
    if any(segment in (b".", b"..") for segment in decoded.split(b"/")):
        raise _refused("dot segments are not allowed in it")


def _refused(why: str) -> BadRequestError:
    return BadRequestError(400, f"The request target was refused: {why}.")
