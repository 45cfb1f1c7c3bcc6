"""What actors print, as JSON lines in the gateway's own log, so that it outlives the driver.

Processes of actors write to the engine's sockets, with nothing in between that could lose their last bytes, so their
pods cannot log what they print. The engine writes it to the standard output of the gateway, where ``kubectl logs`` and
log shippers find it, with the mesh, the rank and the pod.

Writing may block, for example on a full disk of the node, so it takes place on a thread. What it cannot keep up with is
dropped, and counted in the log.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone

from meshgate_gateway.engine.output.lines import PrintedLine

log = logging.getLogger(__name__)

# Bytes of a record. The engines of all sessions write to one pipe, which keeps writes of up to 4096 bytes together.
MAX_RECORD = 4096
MAX_WAITING = 16 * 2**20  # bytes of records that wait to be written
CLOSE_TIMEOUT = 2.0  # seconds


class OutputLog:
    """Writes records to ``descriptor`` on a thread. ``session`` is part of each record."""

    def __init__(self, descriptor: int) -> None:
        self.session = ""
        self._descriptor = descriptor
        self._waiting: deque[bytes] = deque()
        self._size = self._dropped = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="meshgate-output-log", daemon=True)
        self._thread.start()

    def add(self, lines: Iterable[PrintedLine]) -> None:
        """Queues the lines. States of a progress bar, which end in a carriage return, are left out."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        records = [record for line in lines if line.end != "\r" for record in self._records(line, now)]
        with self._changed:
            for record in records:
                if self._size + len(record) > MAX_WAITING:
                    self._dropped += 1
                else:
                    self._waiting.append(record)
                    self._size += len(record)
            self._changed.notify()

    def close(self) -> None:
        """Writes the records that wait, for ``CLOSE_TIMEOUT`` seconds at most. Blocks; idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_TIMEOUT)

    def _records(self, line: PrintedLine, now: str) -> Iterator[bytes]:
        facts = {"event": "output", "session": self.session, "mesh": line.mesh, "rank": line.rank}
        facts |= {"host": line.host, "stream": line.stream, "timestamp": now}
        room = MAX_RECORD - len(_encode({**facts, "partial": True, "text": ""}))
        parts = list(_split(line.text, room))
        for index, part in enumerate(parts):
            partial = {"partial": True} if index + 1 < len(parts) else {}
            yield _encode({**facts, **partial, "text": part})

    def _write_all(self) -> None:
        while (record := self._next()) is not None:
            try:
                _write(self._descriptor, record)
            except OSError as error:
                log.warning("cannot write what actors print to the gateway's log, and stop trying: %s", error)
                return

    def _next(self) -> bytes | None:
        """Waits for the next record; None after the last one, once the log is closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._dropped or self._closing)
            if self._waiting:
                record = self._waiting.popleft()
                self._size -= len(record)
                return record
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                return _encode({"event": "output dropped", "session": self.session, "records": dropped})
            return None


def _encode(facts: dict[str, object]) -> bytes:
    return json.dumps(facts, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _split(text: str, room: int) -> Iterator[str]:
    """Parts of ``text`` that each take up at most ``room`` bytes in a record."""
    if len(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")) - 2 <= room or len(text) < 2:
        yield text
    else:
        middle = len(text) // 2
        yield from _split(text[:middle], room)
        yield from _split(text[middle:], room)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
