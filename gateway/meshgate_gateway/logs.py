"""Structured logs on stderr: one event per line, credentials redacted.

Redaction is the last step before rendering and covers every string, so callers need not think of it. Records of the
standard library's ``logging``, such as those of asyncio, take the same path.

Logging never raises: an event that cannot be written, because the disk is full or stderr is closed, is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_Value: TypeAlias = "str | dict[str, _Value] | list[_Value] | object"
_BEARER = re.compile(r"(?i)\b(bearer)\s+[^\s\"']+")
_SECRET_KEYS = frozenset({"authorization", "token", "cookie"})
REDACTED = "[redacted]"


class Redactor:
    """A structlog processor that redacts known secrets, anything after ``Bearer``, and the values of secret keys."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = tuple(secret for secret in secrets if secret)

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {
            self._text(key): REDACTED if key.lower() in _SECRET_KEYS else self._value(value)
            for key, value in event.items()
        }

    def _value(self, value: _Value) -> _Value:
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, dict):
            return {self._text(str(key)): self._value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self._value(item) for item in value]
        return self._text(value if isinstance(value, str) else repr(value))

    def _text(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        return _BEARER.sub(rf"\1 {REDACTED}", text)


def configure_logs(level: str, form: Literal["json", "text"], secrets: Iterable[str]) -> None:
    """Configures structlog and the standard library's logging for this process."""
    chain: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        Redactor(secrets),
    ]
    renderer: Processor = structlog.processors.JSONRenderer() if form == "json" else _render_text
    threshold: int = getattr(logging, level.upper())
    structlog.configure(
        processors=[*chain, renderer],
        wrapper_class=_never_raising(structlog.make_filtering_bound_logger(threshold)),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.raiseExceptions = False
    logging.captureWarnings(True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=chain,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _never_raising(base: type[Any]) -> type[Any]:
    """A subclass of structlog's bound logger ``base`` that drops an event it cannot render or write."""

    class NeverRaising(base):  # type: ignore[misc]
        def _proxy_to_logger(self, method_name: str, event: str | None = None, *args: Any, **facts: Any) -> Any:
            with contextlib.suppress(Exception):
                return super()._proxy_to_logger(method_name, event, *args, **facts)

    return NeverRaising


def _render_text(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """``2026-01-31T12:00:00Z info  session started  session=… pid=…``, always one line."""
    time, level, name = (str(event.pop(key, "")) for key in ("timestamp", "level", "event"))
    facts = " ".join(f"{key}={_quoted(value)}" for key, value in event.items())
    return f"{time[:23]} {level:<7} {_one_line(name)}  {facts}".rstrip()


def _quoted(value: object) -> str:
    text = _one_line(str(value))
    return f'"{text}"' if " " in text or not text else text


def _one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
