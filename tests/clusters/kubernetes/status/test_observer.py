"""The observed objects of a namespace, over watches that end and are restarted."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Conflict, Forbidden, KubernetesError, Unreachable
from meshgate_kubernetes.status.observer import Observer, WatchTarget
from tests.clusters.kubernetes.objects import Object, pod

END = object()


class FakeWatch(Iterator[tuple[str, Object]]):
    def __init__(self, events: queue.Queue[Any]) -> None:
        self._events = events
        self.resource_version = ""

    def __next__(self) -> tuple[str, Object]:
        event = self._events.get()
        if isinstance(event, KubernetesError):
            raise event
        if event is END:
            raise StopIteration
        self.resource_version = "7"
        return cast("tuple[str, Object]", event)

    def close(self) -> None:
        self._events.put(END)


class FakeApi:
    """``lists``: the results of the listings, the last one repeated; ``events``: the events of the current watch."""

    def __init__(self, *lists: list[Object] | KubernetesError) -> None:
        self._lists = list(lists)
        self.events: queue.Queue[Any] = queue.Queue()
        self.listed = 0
        self.watched_from: list[str] = []
        self.fields: set[str] = set()

    def list_objects(self, kind: str, namespace: str, selector: str = "", fields: str = "") -> tuple[list[Object], str]:
        self.listed += 1
        self.fields.add(fields)
        found = self._lists.pop(0) if len(self._lists) > 1 else self._lists[0]
        if isinstance(found, KubernetesError):
            raise found
        return found, "1"

    def watch(self, kind: str, namespace: str, selector: str, resource_version: str, fields: str = "") -> FakeWatch:
        self.watched_from.append(resource_version)
        self.fields.add(fields)
        return FakeWatch(self.events)


def observer(api: FakeApi, *targets: WatchTarget) -> Observer:
    return Observer(cast("Api", api), "team", targets or (WatchTarget("Pod"),))


def names(observed: Observer) -> set[str]:
    return {each["metadata"]["name"] for each in observed.objects("Pod")}


def test_listed_objects_and_changes_are_observed() -> None:
    api = FakeApi([pod("a")])
    with observer(api) as observed:
        assert observed.wait_for(lambda: names(observed) == {"a"}, 5)
        api.events.put(("ADDED", pod("b")))
        assert observed.wait_for(lambda: names(observed) == {"a", "b"}, 5)
        api.events.put(("DELETED", pod("a")))
        assert observed.wait_for(lambda: names(observed) == {"b"}, 5)


def test_a_watch_that_ends_is_continued_without_a_new_list() -> None:
    api = FakeApi([pod("a")])
    with observer(api) as observed:
        assert observed.wait_for(lambda: names(observed) == {"a"}, 5)
        api.events.put(("ADDED", pod("b")))
        api.events.put(END)
        api.events.put(("ADDED", pod("c")))
        assert observed.wait_for(lambda: names(observed) == {"a", "b", "c"}, 5)
    assert api.listed == 1
    assert api.watched_from[:2] == ["1", "7"]


def test_an_expired_resource_version_causes_a_new_list() -> None:
    api = FakeApi([pod("a")], [pod("c")])
    with observer(api) as observed:
        api.events.put(Conflict("too old resource version"))
        assert observed.wait_for(lambda: names(observed) == {"c"}, 5)


def test_an_unavailable_api_server_is_retried() -> None:
    api = FakeApi(Unreachable("unavailable"), [pod("a")])
    with observer(api) as observed:
        assert observed.wait_for(lambda: names(observed) == {"a"}, 5)
        assert observed.trouble is None


def test_a_missing_permission_ends_the_wait_unless_the_target_is_optional() -> None:
    forbidden = FakeApi(Forbidden("list", "events", "team"))
    with observer(forbidden, WatchTarget("Event")) as observed, pytest.raises(Forbidden, match="may not list events"):
        observed.wait(-1, 5)
    with observer(forbidden, WatchTarget("Event", optional=True)) as observed:
        assert observed.wait(-1, 5) >= 0
        assert observed.objects("Event") == []


def test_changes_accumulate_after_a_long_look() -> None:
    api = FakeApi([])
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            continue
        return len(observed.objects("Pod")) == 100

    def change() -> None:
        for number in range(100):
            api.events.put(("ADDED", pod(f"pod-{number}")))
            time.sleep(0.005)

    changes = threading.Thread(target=change)
    with observer(api) as observed:
        changes.start()
        assert observed.wait_for(look, 30)
        changes.join()
    assert looks < 20  # of a hundred changes


def test_a_wait_times_out() -> None:
    with observer(FakeApi([])) as observed:
        assert not observed.wait_for(lambda: False, 0.05)


def test_objects_are_selected_by_target() -> None:
    api = FakeApi([pod("a")])
    with observer(api, WatchTarget("Pod", "x=1"), WatchTarget("Pod", "x=2")) as observed:
        assert observed.wait_for(lambda: len(observed.objects("Pod", "x=1")) == 1, 5)
        assert observed.objects("Pod", "x=3") == []
        assert len(observed.objects("Pod")) == 1


def test_a_target_is_listed_and_watched_with_its_fields() -> None:
    api = FakeApi([pod("a")])
    with observer(api, WatchTarget("Pod", fields="spec.nodeName=a")) as observed:
        assert observed.wait_for(lambda: bool(api.watched_from), 5)
    assert api.fields == {"spec.nodeName=a"}


def test_close_ends_all_threads() -> None:
    before = set(threading.enumerate())
    with observer(FakeApi([])) as observed:
        observed.wait(-1, 5)
    assert set(threading.enumerate()) <= before
