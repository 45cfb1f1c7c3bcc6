"""Events by object, and how often a look at many pods reads them."""

from __future__ import annotations

from typing import Any

from meshgate_kubernetes.status.diagnosis import Stage, controller_problems, examine_pod
from meshgate_kubernetes.status.events import EventIndex
from tests.clusters.kubernetes.objects import pod


class Event(dict[str, Any]):
    reads = 0

    def __getitem__(self, key: str) -> Any:
        Event.reads += key == "involvedObject"
        return super().__getitem__(key)


def test_a_look_at_a_thousand_pods_reads_each_event_a_few_times() -> None:
    pods = [pod(f"a-{number}", ready=False) for number in range(1000)]
    involved = [{"kind": "Pod", "name": each["metadata"]["name"], "uid": each["metadata"]["uid"]} for each in pods]
    index = EventIndex(Event(reason="Pulling", involvedObject=involved[number % 1000]) for number in range(5000))
    examined = [examine_pod(each, index.about(each)) for each in pods]
    assert list(controller_problems(index.all, {"statefulset a": 1})) == []
    assert {each.stage for each in examined} == {Stage.PULLING}
    assert Event.reads <= 3 * 5000


def test_events_are_found_by_the_uid_of_their_object_in_order() -> None:
    events = [{"reason": str(number), "involvedObject": {"uid": f"uid-{name}"}} for number, name in enumerate("aba")]
    assert [event["reason"] for event in EventIndex(events).about(pod("a"))] == ["0", "2"]
    assert EventIndex(events).about(pod("c")) == []
