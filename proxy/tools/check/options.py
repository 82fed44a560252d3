"""What is asked of whom, as the command line says it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx

from proxy.addresses import origin
from proxy.tools.check.report import CheckError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["CheckOptions", "make_options"]

_HEADER = re.compile(r"\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*:(.*)")  # RFC 9110, section 5.6.2


@dataclass(frozen=True)
class CheckOptions:
    """What is asked of whom.

    ``through`` is a proxy in front of ``url``; ``headers`` go with every request; ``model`` None is
    the first that is listed; ``timeout_s`` is how long all questions to one address may take.
    """

    url: str
    through: str | None = None
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca_file: Path | None = None
    timeout_s: float = 60.0


def make_options(
    url: str,
    through: str | None = None,
    *,
    model: str | None,
    api_key: str | None,
    headers: Iterable[str],
    ca_file: Path | None,
    timeout_s: float,
) -> CheckOptions:
    """Return what the command line asks for; ``CheckError`` says what it may not."""
    sent = httpx.Headers()
    if api_key is not None:
        key = api_key.strip()
        if not (key and key.isascii() and key.isprintable()):
            raise CheckError("--api-key: it is empty or holds characters that no header can")
        sent["authorization"] = f"Bearer {key}"
    for header in headers:
        match = _HEADER.fullmatch(header)
        if match is None or not header.isprintable():
            raise CheckError("--header: write it as 'NAME: VALUE'")
        sent[match[1]] = match[2].strip()
    return CheckOptions(
        url=_address("URL", url),
        through=_address("--through", through) if through is not None else None,
        model=model,
        headers=sent,
        ca_file=ca_file,
        timeout_s=timeout_s,
    )


def _address(what: str, url: str) -> str:
    """Accept an address with or without the ``/v1`` that clients put behind it."""
    try:
        return origin(url).removesuffix("/v1")
    except ValueError as error:
        raise CheckError(f"{what} {error}") from error
