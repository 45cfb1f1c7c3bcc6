"""A thread that calls functions one after the other, for calls that may block and must not hold up the connection."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger("meshgate.session.serial_thread")


class SerialThread:
    """Calls functions in order on a daemon thread, which starts with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], object]) -> None:
        """Calls ``function`` on the thread. Never blocks. An exception is logged.

        Finalizers may call this once the thread has started.
        """
        self._queue.put(function)
        if self._thread is not None:  # then a finalizer, which must not take locks, can call this
            return
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def is_current(self) -> bool:
        """Whether this is called on the thread."""
        return threading.current_thread() is self._thread

    def close(self, timeout: float) -> None:
        """Ends the thread after the calls so far, and waits for that for up to ``timeout`` seconds."""
        self._queue.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        while (function := self._queue.get()) is not None:
            try:
                function()
            except Exception:
                log.exception("%s failed", self._name)
