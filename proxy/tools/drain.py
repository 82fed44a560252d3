"""Ask a running proxy to drain, wherever its admin port is."""

from __future__ import annotations

import httpx

from proxy.errors import LastwordError
from proxy.settings import load_settings

__all__ = ["drain", "find_admin_url"]

_ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - bound by another, asked here


def find_admin_url() -> str:
    """Return where a proxy with this environment has its admin port, as its own host reaches it.

    Raises ``SettingsError`` as ``load_settings`` does, and ``LastwordError`` for port 0.
    """
    settings = load_settings(upstream="http://127.0.0.1")  # may be missing: nobody asks it
    port = settings.admin_port
    if not port:
        raise LastwordError("LASTWORD_ADMIN_PORT is 0, any free port: say with --admin which it is")
    host = _ALL_ADDRESSES.get(settings.admin_host, settings.admin_host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def drain(admin: str) -> int:
    """Wait until nothing runs or the grace is over; return how many requests still run.

    Raises ``LastwordError`` if the proxy cannot be asked.
    """
    try:
        answer = httpx.post(f"{admin.rstrip('/')}/drain", timeout=None, trust_env=False)  # noqa: S113 - the proxy bounds it
        answer.raise_for_status()
        state = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise LastwordError(f"{admin} could not be asked to drain: {error}") from error
    return 0 if state["drained"] else int(state["active"])
