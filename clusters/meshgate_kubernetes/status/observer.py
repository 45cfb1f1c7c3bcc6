"""The current objects of a namespace, kept up to date by watches.

One thread per target lists the objects, then applies changes under a lock and wakes waiters. Nothing is polled. A
watch that ends, as all do after some minutes or when the API server restarts, is restarted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from typing_extensions import Self

from meshgate_kubernetes.api.client import Api, Watch
from meshgate_kubernetes.errors import Conflict, Forbidden, KubernetesError
from meshgate_kubernetes.manifests.spec import Object

_MIN_RETRY_DELAY = 0.2
_MAX_RETRY_DELAY = 5.0
_PAUSE_FACTOR = 300.0
"""How much longer than a look at all objects the pause after it is: a third of 1 % of a processor at most."""
_MAX_PAUSE = 2.0
_BATCH_TIME = 0.001
"""Seconds per object for which changes wait to be read together: a thousand pods change often, two do not."""
_MAX_BATCH_TIME = 1.0
_BUFFERED = 0.002
"""Seconds within which the next change is returned if it has arrived before."""


@dataclass(frozen=True, slots=True)
class WatchTarget:
    """Objects to watch, by labels and fields. ``optional``: continue without them if the user may not list them."""

    kind: str
    selector: str = ""
    optional: bool = False
    fields: str = ""


class Observer:
    """The objects of some targets in one namespace. A context manager that ends its threads.

    ``trouble`` is the last error of a watch that is being retried; None if all watches work.
    """

    def __init__(
        self, api: Api, namespace: str, targets: Sequence[WatchTarget], on_change: Callable[[], None] = lambda: None
    ) -> None:
        """``on_change`` is called on a watch's thread after every change. It must not block."""
        self._api = api
        self._on_change = on_change
        self._namespace = namespace
        self._changed = threading.Condition()
        self._version = 0
        self._objects: dict[WatchTarget, dict[str, Object]] = {}
        self._watches: dict[WatchTarget, Watch] = {}
        self._failure: KubernetesError | None = None
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, args=(target,), name=f"watch {target.kind}", daemon=True)
            for target in dict.fromkeys(targets)
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
        """Ends the watches and joins their threads."""
        self._closed.set()
        with self._changed:
            for watch in self._watches.values():
                watch.close()
        for thread in self._threads:
            thread.join()

    @property
    def listed(self) -> bool:
        """Whether every target has been listed, so that ``objects`` is complete."""
        with self._changed:
            return len(self._objects) == len(self._threads)

    def objects(self, kind: str, selector: str | None = None) -> list[Object]:
        """The objects of ``kind`` from all its targets, or from the one with this selector."""
        with self._changed:
            found = {
                uid: obj
                for target, objs in self._objects.items()
                if target.kind == kind and selector in (None, target.selector)
                for uid, obj in objs.items()
            }
        return list(found.values())

    def wait(self, version: int, timeout: float | None) -> int:
        """Waits for a change after ``version`` (initially -1), and until every target has been listed.

        Returns the current version, which is unchanged after ``timeout`` seconds. Raises Forbidden for a target that
        is not optional.
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

    def collect(self, look: float) -> None:
        """Lets changes accumulate after a look at all objects that took ``look`` seconds of CPU time, because a look
        costs the same for one change as for a hundred. Returns early when the observer is closed."""
        self._closed.wait(min(_MAX_PAUSE, _PAUSE_FACTOR * look))

    def wait_for(self, done: Callable[[], bool], timeout: float | None) -> bool:
        """Waits until ``done()``, evaluated after changes, is true. Returns False after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        version = -1
        while True:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return False
            version = self.wait(version, remaining)
            looked = time.thread_time()
            if version >= 0 and self.listed and done():
                return True
            self.collect(time.thread_time() - looked)

    # --- one thread per target ----------------------------------------------------------------------------

    def _follow(self, target: WatchTarget) -> None:
        delay = _MIN_RETRY_DELAY
        while not self._closed.is_set():
            try:
                self._list_and_watch(target)
                delay = _MIN_RETRY_DELAY
            except Forbidden as error:
                if not target.optional:
                    self._update(failure=error)
                    return
                self._update(lambda: self._objects.setdefault(target, {}))
                return
            except Conflict:  # the resource version is too old: list again
                self._closed.wait(_MIN_RETRY_DELAY)
            except KubernetesError as error:
                self._update(lambda error=error: setattr(self, "trouble", error))  # type: ignore[misc]
                self._closed.wait(delay)
                delay = min(2 * delay, _MAX_RETRY_DELAY)

    def _list_and_watch(self, target: WatchTarget) -> None:
        """Lists the objects once, then follows watches until closed. Raises Conflict if a version is too old."""
        listed, version = self._api.list_objects(target.kind, self._namespace, target.selector, target.fields)
        fresh = {obj["metadata"]["uid"]: obj for obj in listed}

        def replace() -> None:
            self._objects[target] = fresh
            self.trouble = None

        self._update(replace)
        while not self._closed.is_set():
            version = self._watch(target, version, fresh)

    def _watch(self, target: WatchTarget, version: str, objects: dict[str, Object]) -> str:
        """Follows one watch to its end. Returns the version from which the next one continues."""
        started = time.monotonic()
        watch = self._api.watch(target.kind, self._namespace, target.selector, version, target.fields)
        with self._changed:
            self._watches[target] = watch
            if self._closed.is_set():
                watch.close()
        asked = time.monotonic()
        for change, obj in watch:
            self._apply(objects, change, obj)
            if time.monotonic() - asked > _BUFFERED:  # to wake for each change costs more than to read it
                self._closed.wait(min(_MAX_BATCH_TIME, len(objects) * _BATCH_TIME))
            asked = time.monotonic()
        if time.monotonic() - started < _MIN_RETRY_DELAY:
            self._closed.wait(_MIN_RETRY_DELAY)
        return watch.resource_version or version

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
