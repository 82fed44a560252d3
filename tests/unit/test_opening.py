"""From the setting to the store, where something is missing."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

import pytest

from proxy.store import StoreError
from proxy.store.opening import open_store
from proxy.store.redis_scripts import SCRIPTS


def test_redis_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has not installed the client is told how."""
    monkeypatch.setitem(sys.modules, "proxy.store.redis", None)
    with pytest.raises(StoreError, match=r"pip install '\.\[redis\]'"):
        open_store("redis://127.0.0.1")


def test_other_stores_do_not_load_the_client() -> None:
    """Whoever has no Redis needs no client, and pays nothing for it."""
    code = (
        "import sys; import proxy.gateway.server, proxy.cli;"
        "sys.exit(any(name.split('.')[0] in ('redis', 'hiredis') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603


def test_every_script_is_used() -> None:
    """Each Lua file is one of the scripts, or what they begin with."""
    names = {file.name for file in (files("proxy.store") / "lua").iterdir()}
    assert names == {f"{name}.lua" for name in SCRIPTS} | {"copy.lua"}
