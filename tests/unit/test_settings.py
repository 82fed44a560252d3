"""Every setting: checked, and documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxy.errors import SettingsError
from proxy.settings import Settings, load_settings

README = Path(__file__).parents[2] / "README.md"


def test_environment_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option counts over its variable, a variable over the default."""
    monkeypatch.setenv("LASTWORD_UPSTREAM", "http://env:1")
    monkeypatch.setenv("LASTWORD_PORT", "9")
    settings = load_settings(upstream="http://given:1/prefix/")
    assert settings.upstream == "http://given:1/prefix"
    assert settings.port == 9
    assert settings.admin_port == 8081


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, r"--upstream \(LASTWORD_UPSTREAM\) is missing"),
        ({"upstream": "vllm:8000"}, r"must be http://HOST"),
        ({"upstream": "ftp://x"}, r"must be http://HOST"),
        ({"upstream": "http://x?y"}, r"without query"),
        ({"upstream": "http://u:p@x"}, r"without query, fragment or user"),
        ({"upstream": "http://x:99999"}, r"must be http://HOST"),
        ({"upstream": "http://x", "correct": "yes"}, r"--correct .*'on', 'observe' or 'off'"),
        ({"upstream": "http://x", "port": 70000}, r"--port .*less than or equal to 65535"),
        ({"upstream": "http://x", "trusted_proxies": "10.0.0.0/8, x"}, r"'x' is not an IP address"),
        ({"upstream": "http://x", "path_prefix": "llm/"}, r"must begin with a slash"),
        ({"upstream": "http://x", "upstream_idle_s": -1}, r"greater than or equal to 0"),
        ({"upstream": "http://x", "nonsense": 1}, r"--nonsense"),
        ({"upstream": "http://x", "store": "redis://"}, r"--store .*must be memory:, sqlite:PATH"),
        ({"upstream": "http://x", "store": "redis://h:0"}, r"--store .*redis://"),
        ({"upstream": "http://x", "store": "redis://h/first"}, r"--store .*/DATABASE"),
        ({"upstream": "http://x", "store": "redis://h?protocol=3"}, r"--store .*what TLS needs"),
        ({"upstream": "http://x", "store": "redis://h"}, r"owner_secret is missing"),
        ({"upstream": "http://x", "owner_secret": "short"}, r"--owner-secret .*at least 16"),
        ({"upstream": "http://x", "lease_s": 0}, r"--lease-s .*greater than or equal to 0.5"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(
    given: dict[str, object], sentence: str
) -> None:
    """The sentence names the option and says what can stand there."""
    with pytest.raises(SettingsError, match=sentence):
        load_settings(**given)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:se:c@ret@h:1/2", "redis://:**********@h:1/2"),
        ("rediss://me:secret@h", "rediss://me:**********@h"),
        ("redis://h:6379", "redis://h:6379"),
        ("sqlite:/data/me@home.db", "sqlite:/data/me@home.db"),
        ("memory:", "memory:"),
    ],
)
def test_a_password_is_shown_to_nobody(url: str, shown: str) -> None:
    """Neither the store's password nor the secret of the owner hash is printed."""
    settings = load_settings(upstream="http://x", store=url, owner_secret="s" * 16)

    assert settings.store.get_secret_value() == url
    assert settings.model_dump(mode="json")["store"] == shown
    assert str(settings.store) == shown
    assert "secret" not in repr(settings).replace("owner_secret", "")
    assert "s" * 16 not in repr(settings)


def test_the_secret_is_needed_where_copies_are_shared() -> None:
    """Without copies nobody needs it."""
    shared = {"upstream": "http://x", "store": "redis://h"}
    assert load_settings(**shared, background="pass").shares_store
    assert load_settings(**shared, owner_secret="s" * 16).owner_secret is not None


def test_settings_table_of_the_readme() -> None:
    """The README's table has every setting once, with its default, and no other."""
    rows = re.findall(r"^\| `--([a-z-]+)` \| ([^|]+) \|", README.read_text(), re.MULTILINE)
    documented = {name.replace("-", "_"): default.strip() for name, default in rows}

    assert sorted(documented) == sorted(Settings.model_fields)
    for name, field in Settings.model_fields.items():
        default = getattr(field.default, "value", field.default)
        shown = (
            "required"
            if field.is_required()
            else f"`{default}`"
            if default not in ("", None)
            else "none"
        )
        assert documented[name] == shown, name
