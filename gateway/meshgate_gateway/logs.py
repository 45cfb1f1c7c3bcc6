"""Structured logs on stderr: one event per line, credentials redacted.

Redaction is the last step before rendering and covers every string, so callers need not think of it. Records of other
libraries, such as those of asyncio, take the same path.

Logging never raises: an event that cannot be written, because the disk is full or stderr is closed, is dropped.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any, Literal, TypeAlias

_Value: TypeAlias = "str | dict[str, _Value] | list[_Value] | object"
_Event: TypeAlias = "dict[str, Any]"
_BEARER = re.compile(r"(?i)\b(bearer)\s+[^\s\"']+")
_SECRET_KEYS = frozenset({"authorization", "token", "cookie"})
REDACTED = "[redacted]"
LOGGER = logging.getLogger("meshgate_gateway")


class EventLog:
    """Logs events with facts: ``log.info("session started", pid=5)``."""

    def __init__(self, facts: Mapping[str, object] | None = None) -> None:
        self._facts = facts or {}

    def bind(self, **facts: object) -> EventLog:
        """A log that adds ``facts`` to each of its events."""
        return EventLog({**self._facts, **facts})

    def debug(self, event: str, **facts: object) -> None:
        self._log(logging.DEBUG, event, facts)

    def info(self, event: str, **facts: object) -> None:
        self._log(logging.INFO, event, facts)

    def warning(self, event: str, **facts: object) -> None:
        self._log(logging.WARNING, event, facts)

    def error(self, event: str, **facts: object) -> None:
        self._log(logging.ERROR, event, facts)

    def exception(self, event: str, **facts: object) -> None:
        """An error, with the traceback of the exception that is being handled."""
        self._log(logging.ERROR, event, facts, with_traceback=True)

    def _log(self, level: int, event: str, facts: Mapping[str, object], *, with_traceback: bool = False) -> None:
        LOGGER.log(level, event, exc_info=with_traceback, extra={"facts": {**self._facts, **facts}})


def event_of(record: logging.LogRecord) -> _Event:
    """What ``record`` says: its facts, and what every event has."""
    time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="microseconds")
    event = {**getattr(record, "facts", {}), "event": record.getMessage(), "level": record.levelname.lower()}
    return {**event, "timestamp": time.replace("+00:00", "Z")}


class EventFormatter(logging.Formatter):
    """An event as one line, without ``secrets``, anything after ``Bearer``, and the values of secret keys."""

    def __init__(self, form: Literal["json", "text"], secrets: Iterable[str]) -> None:
        super().__init__()
        self._render = json.dumps if form == "json" else _render_text
        self._secrets = tuple(secret for secret in secrets if secret)

    def format(self, record: logging.LogRecord) -> str:
        event = event_of(record)
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return self._render(self.redact(event))

    def redact(self, event: _Event) -> _Event:
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
    """Configures the log of this process."""
    logging.raiseExceptions = False
    logging.captureWarnings(True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EventFormatter(form, secrets))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _render_text(event: _Event) -> str:
    """``2026-01-31T12:00:00Z info  session started  session=… pid=…``, always one line."""
    time, level, name = (str(event.pop(key, "")) for key in ("timestamp", "level", "event"))
    facts = " ".join(f"{key}={_quoted(value)}" for key, value in event.items())
    return f"{time[:23]} {level:<7} {_one_line(name)}  {facts}".rstrip()


def _quoted(value: object) -> str:
    text = _one_line(str(value))
    return f'"{text}"' if " " in text or not text else text


def _one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
