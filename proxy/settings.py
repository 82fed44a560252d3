"""Every setting, once: a field here, an option of ``serve``, a ``LASTWORD_`` variable."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from proxy.addresses import (
    REDIS_SCHEMES,
    StoreUrl,
    masked,
    networks,
    origin,
    prefix,
    store_url,
)
from proxy.core.corrector import Mode
from proxy.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic_core import ErrorDetails

__all__ = ["Background", "OnLostUpstream", "Settings", "load_settings", "unknown_variables"]

MIB = 1024 * 1024
# What else has such a name: a tool's variable, and what Kubernetes tells of a Service "lastword".
_NO_SETTINGS = re.compile(r"LASTWORD_(VLLM_PYTHON|(.*_)?SERVICE_(HOST|PORT)(_.*)?|(.*_)?PORT_.*)")


class Background(StrEnum):
    """Who runs background responses and keeps their events."""

    AUTO = "auto"
    UPSTREAM = "upstream"
    PROXY = "proxy"
    PASS = "pass"  # noqa: S105 - a mode's name, no password


class OnLostUpstream(StrEnum):
    """How a direct stream ends that upstream did not end."""

    FAILED_CUT = "failed_cut"
    FAILED = "failed"
    ABORT = "abort"


Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, Field(gt=0)]


class Settings(BaseSettings):
    """What an operator can set.  Times are seconds and may be fractions; sizes are bytes."""

    model_config = SettingsConfigDict(env_prefix="LASTWORD_", frozen=True, extra="forbid")

    upstream: Annotated[str, AfterValidator(origin)] = Field(
        description="vLLM's address, such as http://127.0.0.1:8000; a path in it is a prefix."
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address the traffic port binds.")
    port: Port = Field(8080, description="Traffic port; 0 takes a free one.")
    admin_host: str = Field("127.0.0.1", min_length=1, description="Address of the admin port.")
    admin_port: Port = Field(
        8081, description="Admin port (/readyz, /metrics); 0 takes a free one."
    )
    correct: Mode = Field(
        Mode.ON,
        description="on corrects streams, observe only counts what it would correct, off looks at"
        " nothing. A request's Lastword-Correct header overrides it.",
    )
    background: Background = Field(
        Background.AUTO,
        description="Who makes background responses: upstream (vLLM, with its store), proxy (the"
        " proxy keeps the stream open), auto (upstream, or proxy where vLLM's store is off), or"
        " pass (nothing is kept).",
    )
    store: Annotated[StoreUrl, AfterValidator(store_url)] = Field(
        StoreUrl("memory:"),
        description="Where copies of background responses are kept: memory:, sqlite:PATH or, for"
        " several replicas, redis://HOST.",
    )
    owner_secret: SecretStr | None = Field(
        None,
        min_length=16,
        description="What keys the hash of owners, at least 16 characters; the same for all"
        " replicas with redis://. Better set as a variable: options can be seen by others.",
    )
    lease_s: Annotated[float, Field(ge=0.5)] = Field(
        10.0,
        description="With redis://, how long a replica may be silent until others take its"
        " background responses over.",
    )
    redis_prefix: str = Field(
        "lastword:", min_length=1, description="What the names of all keys in Redis begin with."
    )
    owner_headers: str = Field(
        "authorization",
        description="Comma-separated headers that tell users apart; a copy is its owner's alone.",
    )
    copy_ttl_s: Annotated[float, Field(gt=0)] = Field(
        3600.0, description="How long a copy is kept after its end."
    )
    tombstone_ttl_s: Annotated[float, Field(gt=0)] = Field(
        86400.0, description="How long it is remembered that a copy was deleted or has expired."
    )
    max_copy_bytes: Bytes = Field(64 * MIB, description="Largest copy; a larger one is not kept.")
    max_store_bytes: Bytes | None = Field(
        None,
        description="Bytes of all copies; the oldest finished ones go first. By default 256 MiB in"
        " memory:, 1 GiB in sqlite: and redis:.",
    )
    path_prefix: Annotated[str, AfterValidator(prefix)] = Field(
        "", description="What stands before /v1/responses in the paths that clients use."
    )
    upstream_host: Literal["preserve", "upstream"] = Field(
        "preserve", description="Send the client's Host header up, or upstream's own name."
    )
    upstream_ca_file: Path | None = Field(
        None, description="PEM file of the authorities that an https upstream is verified with."
    )
    trusted_proxies: Annotated[str, AfterValidator(networks)] = Field(
        "", description="Comma-separated networks whose X-Forwarded-* headers are appended to."
    )
    on_lost_upstream: OnLostUpstream = Field(
        OnLostUpstream.FAILED_CUT,
        description="How a stream ends that vLLM does not end: failed_cut sends response.failed"
        " and cuts the connection, failed ends it cleanly, abort only cuts.",
    )
    connect_timeout_s: Annotated[float, Field(gt=0)] = Field(
        5.0, description="How long connecting to upstream may take."
    )
    upstream_idle_s: Seconds = Field(
        600.0,
        description="How long upstream may be silent before its answer is given up; 0 = off (only"
        " with heartbeat_s 0).",
    )
    stall_check_s: Seconds = Field(
        10.0,
        description="After how much silence vLLM is asked about a background response; 0 = never.",
    )
    upstream_down_s: Seconds = Field(
        10.0,
        description="How long vLLM may be down before its background responses are given up.",
    )
    upstream_keepalive_s: Annotated[float, Field(gt=0)] = Field(
        4.0, description="How long an idle upstream connection is kept; below vLLM's own 5 s."
    )
    heartbeat_s: Seconds = Field(
        15.0, description="A sign of life is sent after so much silence on a stream; 0 = off."
    )
    heartbeat_kind: Literal["comment", "event"] = Field(
        "comment", description="comment, which clients skip, or event, a keepalive event."
    )
    write_stall_s: Annotated[float, Field(gt=0)] = Field(
        300.0,
        description="How long a client may take nothing, or send nothing of a body that it has"
        " begun, before its connection is cut.",
    )
    max_headers: Annotated[int, Field(gt=0)] = Field(
        100, description="Most headers of a request, and most trailers; more are 431."
    )
    max_header_bytes: Bytes = Field(
        64 * 1024, description="Bytes of a request's line and headers; more are 431 (or 414)."
    )
    header_timeout_s: Annotated[float, Field(gt=0)] = Field(
        10.0, description="How long a request's head may take from its first byte; then it is 408."
    )
    max_request_body_bytes: Bytes = Field(
        64 * MIB, description="Largest request body; a larger one is 413."
    )
    max_event_bytes: Bytes = Field(
        64 * MIB, description="Largest event that is looked at; a longer one passes uncorrected."
    )
    max_buffered_bytes: Bytes = Field(
        256 * MIB,
        description="Bytes of request bodies, half events and unread output held in all; beyond"
        " it new requests are 503 and half events pass uncorrected.",
    )
    max_streams: Annotated[int, Field(gt=0)] | None = Field(
        None,
        description="Requests and background runs on the two Responses routes, and WebSockets, at"
        " once; further ones are 503. By default only the limit of open files.",
    )
    drain_delay_s: Seconds = Field(
        0.0, description="How long new requests are still served after SIGTERM, when not ready."
    )
    shutdown_grace_s: Seconds = Field(
        25.0, description="How long running streams may go on once it stops."
    )
    ready_needs_upstream: bool = Field(
        True,
        description="Ask vLLM's /health every second, and be ready only while it answers below"
        " 500; false never asks.",
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto is console on a terminal and json elsewhere."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least that is logged; warning leaves the requests out, too."
    )
    log_requests: bool = Field(True, description="Log one line per request, at its end.")

    @model_validator(mode="after")
    def _heartbeats_need_an_end(self) -> Self:
        """A heartbeat keeps every client waiting, so something must end a stuck engine's stream."""
        if self.heartbeat_s and not self.upstream_idle_s:
            raise ValueError("upstream_idle_s may be 0 only with heartbeat_s 0")
        return self

    def shown(self) -> dict[str, object]:
        """Return the settings by name as JSON has them, fit to be shown: what is secret is masked.

        A field that holds a secret is a ``SecretStr``; users, passwords and query values of URLs
        are masked wherever they stand.
        """
        return {
            name: masked(value) if isinstance(value, str) else value
            for name, value in self.model_dump(mode="json").items()
        }

    @model_validator(mode="after")
    def _replicas_share_a_secret(self) -> Self:
        """Each with a secret of its own, no replica would find what another has kept."""
        if self.keeps_copies and self.shares_store and self.owner_secret is None:
            raise ValueError(
                "owner_secret is missing: with a redis store every replica needs the same one"
                " (LASTWORD_OWNER_SECRET, at least 16 characters)"
            )
        return self

    @property
    def shares_store(self) -> bool:
        """Whether other replicas use the same store."""
        return self.store.get_secret_value().partition(":")[0] in REDIS_SCHEMES

    @property
    def keeps_copies(self) -> bool:
        """Whether background responses are kept; uncorrected streams never are."""
        return self.background is not Background.PASS and self.correct is Mode.ON


def load_settings(**given: object) -> Settings:
    """Return the settings from options, then environment, then defaults.

    Raises ``SettingsError`` with one line per wrong value that says what is allowed.
    """
    try:
        return Settings(**given)  # type: ignore[arg-type]  # pydantic checks and converts
    except ValidationError as error:
        lines = [_explain(item["loc"], _message(item), item["type"]) for item in error.errors()]
        raise SettingsError("\n".join(lines)) from error


def _message(item: ErrorDetails) -> str:
    if item["type"] == "too_short":  # pydantic speaks of items, whatever they are
        return f"at least {item['ctx']['min_length']} characters"
    return item["msg"]


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Return those names of variables that look like a setting's and are none: misspelt ones."""
    known = {f"LASTWORD_{name.upper()}" for name in Settings.model_fields}
    return sorted(
        name
        for name in names
        if name.upper().startswith("LASTWORD_")
        and name.upper() not in known
        and not _NO_SETTINGS.fullmatch(name.upper())
    )


def _explain(location: tuple[int | str, ...], message: str, kind: str) -> str:
    if not location:
        return message.removeprefix("Value error, ")
    name = str(location[0])
    option = f"--{name.replace('_', '-')} (LASTWORD_{name.upper()})"
    if kind == "missing":
        return f"{option} is missing"
    message = message.removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{option}: {message}"
