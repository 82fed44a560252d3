"""Structured logs on stderr: one line per event, for people on a terminal and as JSON elsewhere.

Our own lines do not pass ``logging``, which would cost several times as much; those of uvicorn,
asyncio and the store's threads come from there and leave in the same form.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from typing import TYPE_CHECKING

import msgspec
import structlog

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger

__all__ = ["configure_logs"]


def configure_logs(log_format: str, log_level: str = "info") -> None:
    """Set logging up once per process.

    ``log_format`` is ``json``, ``console``, or ``auto`` by the terminal; ``log_level`` the least
    that is logged: ``debug``, ``info``, ``warning`` or ``error``.
    """
    level = logging.getLevelNamesMapping()[log_level.upper()]
    terminal = bool(sys.stderr and sys.stderr.isatty())  # there may be none at all
    console = log_format == "console" or (log_format == "auto" and terminal)
    renderer: list[Processor] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=terminal,
                # The default shows every frame's locals where rich is installed: keys and bodies.
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
        if console
        else [structlog.processors.format_exc_info, _render_json]
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderer,
        ],
        logger_factory=_Stderr,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers = [_Forward()]
    root.setLevel(level)
    logging.captureWarnings(capture=True)
    # uvicorn's "Started server process" and the like are not ours; its warnings are.
    logging.getLogger("uvicorn").setLevel(max(level, logging.WARNING))


class _Stderr:
    """Writes whole lines to stderr; where nobody takes them any more, the proxy serves on."""

    def __init__(self, *_: object) -> None:
        """Take the logger's name, which says nothing here."""

    def msg(self, line: str | bytes) -> None:
        """Write one line."""
        data = line.encode("utf-8", "backslashreplace") if isinstance(line, str) else line
        if not sys.stderr:
            return
        with contextlib.suppress(OSError, ValueError):  # there is no other place to say so
            stream = sys.stderr.buffer
            stream.write(data + b"\n")
            stream.flush()

    debug = info = warning = error = critical = exception = msg


class _Forward(logging.Handler):
    """Hands on what other libraries log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log one record as a line of our own."""
        try:
            level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)
            structlog.get_logger().log(
                level, record.getMessage(), logger=record.name, exc_info=record.exc_info
            )
        except Exception:  # noqa: BLE001 - logging's own way to tell of a broken record
            self.handleError(record)


_encoder = msgspec.json.Encoder(enc_hook=str)


def _render_json(_: WrappedLogger, __: str, event: EventDict) -> bytes:
    try:
        return _encoder.encode(event)
    except UnicodeEncodeError:  # a file name that is no text, say
        return json.dumps(event, default=str).encode()
