"""What the proxy makes of the settings that a file in deploy/ gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proxy.settings import Settings, load_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["accepted", "last_seconds"]

MARGIN_S = 10
"""What ending the streams that are left takes at most, and closing the store."""


def accepted(environment: Mapping[str, str]) -> Settings:
    """Return the settings that these variables make; none may be unknown, and none refused."""
    ours = {name: value for name, value in environment.items() if name.startswith("LASTWORD_")}
    unknown = {
        name for name in ours if name.removeprefix("LASTWORD_").lower() not in Settings.model_fields
    }
    assert not unknown, f"no settings: {unknown}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ours.items():
            patch.setenv(name, value)
        return load_settings()


def last_seconds(settings: Settings) -> float:
    """Return how long a proxy must be left after SIGTERM before it is killed."""
    return settings.drain_delay_s + settings.shutdown_grace_s + MARGIN_S
