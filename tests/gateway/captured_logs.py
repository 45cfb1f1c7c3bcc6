from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from meshgate_gateway.logs import LOGGER, event_of


@contextlib.contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """The events that the gateway's code logs in this process meanwhile."""
    events: list[dict[str, Any]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            events.append(event_of(record))

    handler, level = Handler(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)
    try:
        yield events
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
