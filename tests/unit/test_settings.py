"""Every setting: checked, and documented."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import SecretStr

from proxy.addresses import StoreUrl
from proxy.errors import LastwordError, SettingsError
from proxy.settings import Settings, load_settings, unknown_variables
from proxy.tools.drain import find_admin_url

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
        ({"upstream": "http://x/a?"}, r"without query"),
        ({"upstream": "http://x/a#b"}, r"without query, fragment or user"),
        ({"upstream": "http://x//y"}, r"must be http://HOST"),
        ({"upstream": "http://x/a/%2e%2E/b"}, r"without dot segments"),
        ({"upstream": "http://x/a%5cb"}, r"must be http://HOST"),
        ({"upstream": "http://x/a b"}, r"must be http://HOST"),
        ({"upstream": "http://u:p@x"}, r"without query, fragment or user"),
        ({"upstream": "http://x:99999"}, r"must be http://HOST"),
        ({"upstream": "http://x", "correct": "yes"}, r"--correct .*'on', 'observe' or 'off'"),
        ({"upstream": "http://x", "port": 70000}, r"--port .*less than or equal to 65535"),
        ({"upstream": "http://x", "trusted_proxies": "10.0.0.0/8, x"}, r"'x' is not an IP address"),
        ({"upstream": "http://x", "path_prefix": "llm/"}, r"must begin with a slash"),
        ({"upstream": "http://x", "upstream_idle_s": -1}, r"greater than or equal to 0"),
        ({"upstream": "http://x", "max_headers": 0}, r"--max-headers .*greater than 0"),
        ({"upstream": "http://x", "max_header_bytes": 0}, r"--max-header-bytes .*greater than 0"),
        ({"upstream": "http://x", "header_timeout_s": 0}, r"--header-timeout-s .*greater than 0"),
        ({"upstream": "http://x", "nonsense": 1}, r"--nonsense"),
        ({"upstream": "http://x", "store": "redis://"}, r"--store .*must be memory:, sqlite:PATH"),
        ({"upstream": "http://x", "store": "redis://h:0"}, r"--store .*redis://"),
        ({"upstream": "http://x", "store": "redis://h/first"}, r"--store .*/DATABASE"),
        ({"upstream": "http://x", "store": "redis://h?protocol=3"}, r"--store .*what TLS needs"),
        ({"upstream": "http://x", "store": "redis://h"}, r"owner_secret is missing"),
        (
            {"upstream": "http://x", "owner_secret": "short"},
            r"--owner-secret .*at least 16 characters",
        ),
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
    ("value", "shown"),
    [
        ("http://127.0.0.1:8000/llm", "http://127.0.0.1:8000/llm"),
        ("redis://alice:hunter2@db:6379/0", "redis://***@db:6379/0"),
        ("redis://:hunter2@db", "redis://***@db"),
        ("redis://hun@ter2:x@db", "redis://***@db"),
        ("redis://db?password=hunter2&hunter2&tls=", "redis://db?password=***&***&tls=***"),
        ("redis://[hunter2", "***"),
        ("sqlite:/var/lib/lastword.db", "sqlite:/var/lib/lastword.db"),
    ],
)
def test_what_is_secret_in_a_url_is_masked(value: str, shown: str) -> None:
    """Who logs in, and with what, is not shown; the place is."""
    settings = load_settings(upstream="http://x").model_copy(update={"store": StoreUrl(value)})

    assert settings.store.get_secret_value() == value
    assert settings.shown()["store"] == str(settings.store) == shown
    assert "hunter2" not in json.dumps(settings.shown()) + repr(settings)


def test_a_secret_setting_is_masked() -> None:
    """A field of its own that is secret is typed so, and so is never shown."""

    class WithSecret(Settings):
        api_key: SecretStr = SecretStr("hunter2")

    shown = WithSecret.model_validate({"upstream": "http://x"}).shown()

    assert set(shown) == set(WithSecret.model_fields)
    assert "hunter2" not in json.dumps(shown)


def test_fields_that_sound_secret_are_typed_so() -> None:
    """Nobody adds a key or a password as a plain string."""
    for name, field in Settings.model_fields.items():
        if {"key", "secret", "password", "token"} & set(name.split("_")):
            assert field.annotation in (SecretStr, SecretStr | None), name


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
        if isinstance(default, bool):
            default = str(default).lower()
        shown = (
            "required"
            if field.is_required()
            else f"`{default}`"
            if default not in ("", None)
            else "none"
        )
        assert documented[name] == shown, name


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [
        (None, None, "http://127.0.0.1:8081"),
        ("::", "9", "http://[::1]:9"),
        ("0.0.0.0", "9", "http://127.0.0.1:9"),  # noqa: S104 - all addresses: also this one
        ("10.0.0.7", None, "http://10.0.0.7:8081"),
    ],
)
def test_admin_port_is_found_by_the_environment(
    host: str | None, port: str | None, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that listens on all addresses is asked at its own host's."""
    for name, value in [("HOST", host), ("PORT", port)]:
        if value is not None:
            monkeypatch.setenv(f"LASTWORD_ADMIN_{name}", value)
    assert find_admin_url() == url


def test_admin_port_that_cannot_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any free port is no address: the error says how to give one."""
    monkeypatch.setenv("LASTWORD_ADMIN_PORT", "0")
    with pytest.raises(LastwordError, match="--admin"):
        find_admin_url()


def test_variables_that_are_no_settings() -> None:
    """A misspelt one is found; what Kubernetes and our own tools set is none of it."""
    names = [
        "LASTWORD_CORRECT",
        "lastword_store",
        "LASTWORD_CORECT",
        "lastword_heartbeet_s",
        "PATH",
    ]
    names += ["LASTWORD_VLLM_PYTHON", "LASTWORD_SERVICE_HOST", "LASTWORD_SERVICE_PORT_HTTP"]
    names += ["LASTWORD_PORT", "LASTWORD_PORT_8080_TCP_ADDR", "LASTWORD_ADMIN_SERVICE_PORT"]
    assert unknown_variables(names) == ["LASTWORD_CORECT", "lastword_heartbeet_s"]
