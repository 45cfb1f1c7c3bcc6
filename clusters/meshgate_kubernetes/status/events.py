"""Events, found by the object that they are about."""

from __future__ import annotations

from collections.abc import Iterable

from meshgate_kubernetes.manifests.spec import Object


class EventIndex:
    """Events in the given order. Each look at a thousand pods asks for the events of every one of them."""

    def __init__(self, events: Iterable[Object]) -> None:
        self.all = tuple(events)
        self._by_uid: dict[str, list[Object]] = {}
        for event in self.all:
            self._by_uid.setdefault(event["involvedObject"].get("uid", ""), []).append(event)

    def about(self, obj: Object) -> list[Object]:
        return self._by_uid.get(str(obj["metadata"].get("uid")), [])
