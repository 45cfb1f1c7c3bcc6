"""What is in a namespace now, kept up to date by watches: lists once, then follows the changes.

One thread a watched kind; each writes what it learns under one lock and wakes whoever waits. Nothing is polled.
A watch that ends, as all do after some minutes or when the API server restarts, is taken up again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from typing_extensions import Self

from meshgate_kubernetes.api import Api, Watch
from meshgate_kubernetes.errors import Conflict, Forbidden, KubernetesError
from meshgate_kubernetes.spec import Object

__all__ = ["Observer", "Source"]

_FIRST_RETRY = 0.2
_LONGEST_RETRY = 5.0


@dataclass(frozen=True, slots=True)
class Source:
    """What to watch. ``optional``: go on without it when the user may not see it."""

    kind: str
    selector: str = ""
    optional: bool = False


class Observer:
    """The objects of some sources in one namespace. A context manager: its threads end with the block.

    ``trouble`` is the last error of a source that is being taken up again, None when all is well.
    """

    def __init__(
        self, api: Api, namespace: str, sources: Sequence[Source], on_change: Callable[[], None] = lambda: None
    ) -> None:
        """``on_change`` is called after every change, on the thread of a watch, and must not block."""
        self._api = api
        self._on_change = on_change
        self._namespace = namespace
        self._changed = threading.Condition()
        self._version = 0
        self._objects: dict[Source, dict[str, Object]] = {}
        self._watches: dict[Source, Watch] = {}
        self._failure: KubernetesError | None = None
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, args=(source,), name=f"watch {source.kind}", daemon=True)
            for source in dict.fromkeys(sources)
        ]
        self.trouble: KubernetesError | None = None

    def open(self) -> None:
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the watches, and returns when their threads have ended."""
        self._closed.set()
        with self._changed:
            for watch in self._watches.values():
                watch.close()
        for thread in self._threads:
            thread.join()

    @property
    def listed(self) -> bool:
        """Whether every source has been listed, so that what is not in ``objects`` is not there."""
        with self._changed:
            return len(self._objects) == len(self._threads)

    def objects(self, kind: str, selector: str | None = None) -> list[Object]:
        """The objects of ``kind`` from all its sources, each once, or from the one with this selector."""
        with self._changed:
            found = {
                uid: obj
                for source, objs in self._objects.items()
                if source.kind == kind and selector in (None, source.selector)
                for uid, obj in objs.items()
            }
        return list(found.values())

    def wait(self, version: int, timeout: float | None) -> int:
        """Waits until something has changed since ``version`` (at first -1) and every source has been listed.

        Returns the present version, an old one when ``timeout`` seconds have passed. Raises what a source cannot
        recover from: Forbidden, of one that is not optional.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._failure is None and (self._version <= version or len(self._objects) < len(self._threads)):
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    break
                self._changed.wait(remaining)
            if self._failure is not None:
                raise self._failure
            return self._version

    def wait_for(self, done: Callable[[], bool], timeout: float | None) -> bool:
        """Waits until ``done()``, asked after every change. False when ``timeout`` seconds have passed before."""
        deadline = None if timeout is None else time.monotonic() + timeout
        version = -1
        while True:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return False
            version = self.wait(version, remaining)
            if version >= 0 and len(self._objects) == len(self._threads) and done():
                return True

    # --- one thread a source ------------------------------------------------------------------------------

    def _follow(self, source: Source) -> None:
        delay = _FIRST_RETRY
        while not self._closed.is_set():
            try:
                self._list_and_watch(source)
                delay = _FIRST_RETRY
            except Forbidden as error:
                if not source.optional:
                    self._update(failure=error)
                    return
                self._update(lambda: self._objects.setdefault(source, {}))
                return
            except Conflict:  # the resource version is too old: list again
                continue
            except KubernetesError as error:
                self._update(lambda error=error: setattr(self, "trouble", error))  # type: ignore[misc]
                self._closed.wait(delay)
                delay = min(2 * delay, _LONGEST_RETRY)

    def _list_and_watch(self, source: Source) -> None:
        listed, version = self._api.find(source.kind, self._namespace, source.selector)
        fresh = {obj["metadata"]["uid"]: obj for obj in listed}

        def replace() -> None:
            self._objects[source] = fresh
            self.trouble = None

        self._update(replace)
        watch = self._api.watch(source.kind, self._namespace, source.selector, version)
        with self._changed:
            self._watches[source] = watch
            if self._closed.is_set():
                watch.close()
        for change, obj in watch:
            self._apply(fresh, change, obj)

    def _apply(self, objects: dict[str, Object], change: str, obj: Object) -> None:
        uid = obj["metadata"]["uid"]

        def update() -> None:
            if change == "DELETED":
                objects.pop(uid, None)
            else:
                objects[uid] = obj

        self._update(update)

    def _update(self, change: Callable[[], object] | None = None, *, failure: KubernetesError | None = None) -> None:
        with self._changed:
            if change is not None:
                change()
            self._failure = self._failure or failure
            self._version += 1
            self._changed.notify_all()
        self._on_change()
