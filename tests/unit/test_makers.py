"""What a background task of the proxy leaves in the log when it fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from proxy.background.makers import Makers
from proxy.store import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Coroutine


async def fails(error: Exception) -> None:
    """Raise it."""
    raise error


@pytest.mark.parametrize(
    ("error", "told", "trace"),
    [
        (StoreUnavailableError("It is away."), "waits for the store", False),
        (RuntimeError("A fault."), "failed inside the proxy", True),
    ],
)
async def test_what_goes_wrong_is_logged(
    error: Exception,
    told: str,
    trace: bool,  # noqa: FBT001
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A store that is away is a warning; only a fault of our own has a traceback."""
    work: Coroutine[None, None, None] = fails(error)
    await Makers.logged(cast("Makers", None), work)
    out = capsys.readouterr().out
    assert told in out
    assert str(error) in out
    assert ("Traceback" in out) is trace
