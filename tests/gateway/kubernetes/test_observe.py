"""The present state of a namespace, followed by watches that end and are taken up again."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import Conflict, Forbidden, KubernetesError, Unreachable
from meshgate_kubernetes.observe import Observer, Source
from tests.gateway.kubernetes.objects import Object, pod

OVER = object()


class FakeWatch(Iterator[tuple[str, Object]]):
    def __init__(self, events: queue.Queue[Any]) -> None:
        self._events = events

    def __next__(self) -> tuple[str, Object]:
        event = self._events.get()
        if isinstance(event, KubernetesError):
            raise event
        if event is OVER:
            raise StopIteration
        return cast("tuple[str, Object]", event)

    def close(self) -> None:
        self._events.put(OVER)


class FakeApi:
    """``lists``: what each listing returns, the last for ever; ``events``: what the present watch tells."""

    def __init__(self, *lists: list[Object] | KubernetesError) -> None:
        self._lists = list(lists)
        self.events: queue.Queue[Any] = queue.Queue()
        self.listed = 0

    def find(self, kind: str, namespace: str, selector: str = "") -> tuple[list[Object], str]:
        self.listed += 1
        found = self._lists.pop(0) if len(self._lists) > 1 else self._lists[0]
        if isinstance(found, KubernetesError):
            raise found
        return found, "1"

    def watch(self, kind: str, namespace: str, selector: str, resource_version: str) -> FakeWatch:
        return FakeWatch(self.events)


def observer(api: FakeApi, *sources: Source) -> Observer:
    return Observer(cast("Api", api), "team", sources or (Source("Pod"),))


def names(seen: Observer) -> set[str]:
    return {each["metadata"]["name"] for each in seen.objects("Pod")}


def test_what_is_listed_and_what_changes_is_seen() -> None:
    api = FakeApi([pod("a")])
    with observer(api) as seen:
        assert seen.wait_for(lambda: names(seen) == {"a"}, 5)
        api.events.put(("ADDED", pod("b")))
        assert seen.wait_for(lambda: names(seen) == {"a", "b"}, 5)
        api.events.put(("DELETED", pod("a")))
        assert seen.wait_for(lambda: names(seen) == {"b"}, 5)


def test_a_watch_that_ends_is_taken_up_from_a_new_list() -> None:
    api = FakeApi([pod("a")], [pod("c")])
    with observer(api) as seen:
        assert seen.wait_for(lambda: names(seen) == {"a"}, 5)
        api.events.put(OVER)
        assert seen.wait_for(lambda: names(seen) == {"c"}, 5)


def test_a_version_that_is_too_old_lists_again() -> None:
    api = FakeApi([pod("a")], [pod("c")])
    with observer(api) as seen:
        api.events.put(Conflict("too old resource version"))
        assert seen.wait_for(lambda: names(seen) == {"c"}, 5)


def test_an_api_server_that_is_away_is_told_and_waited_for() -> None:
    api = FakeApi(Unreachable("gone fishing"), [pod("a")])
    with observer(api) as seen:
        assert seen.wait_for(lambda: names(seen) == {"a"}, 5)
        assert seen.trouble is None


def test_a_right_that_is_missing_ends_the_wait_unless_one_can_do_without() -> None:
    forbidden = FakeApi(Forbidden("list", "events", "team"))
    with observer(forbidden, Source("Event")) as seen, pytest.raises(Forbidden, match="may not list events"):
        seen.wait(-1, 5)
    with observer(forbidden, Source("Event", optional=True)) as seen:
        assert seen.wait(-1, 5) >= 0
        assert seen.objects("Event") == []


def test_a_wait_ends_with_its_time() -> None:
    with observer(FakeApi([])) as seen:
        assert not seen.wait_for(lambda: False, 0.05)


def test_the_objects_of_one_source_can_be_told_apart() -> None:
    api = FakeApi([pod("a")])
    with observer(api, Source("Pod", "x=1"), Source("Pod", "x=2")) as seen:
        assert seen.wait_for(lambda: len(seen.objects("Pod", "x=1")) == 1, 5)
        assert seen.objects("Pod", "x=3") == []
        assert len(seen.objects("Pod")) == 1


def test_no_thread_outlives_it() -> None:
    before = threading.active_count()
    with observer(FakeApi([])) as seen:
        seen.wait(-1, 5)
    assert threading.active_count() == before
