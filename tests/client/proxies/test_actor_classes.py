from __future__ import annotations

import pickle

import pytest

from meshgate.actors.api import Actor, endpoint
from meshgate.errors import StaleCodeWarning
from meshgate.proxies import ProcMeshProxy, actor_classes
from meshgate.proxies.actor_classes import actor_class_of, actor_class_to_spawn
from meshgate_wire.messages import SpawnActors
from tests.client.counting import Counter
from tests.client.scripted_gateway import ScriptedGateway


class WithStop(Actor):
    @endpoint
    def stop(self) -> None: ...  # type: ignore[override]


class Mixed(Actor):
    @endpoint
    def one(self) -> None: ...

    @endpoint
    async def two(self) -> None: ...


def test_a_class_is_inspected_once() -> None:
    assert actor_class_of(Counter) is actor_class_of(Counter)


def test_a_class_of_a_changed_script_warns_that_it_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Actor):
        @endpoint
        def here(self) -> int: ...

    monkeypatch.setattr(actor_classes, "changed_script", lambda Class: "train.py")
    warning = r"train\.py was saved since this program started, and \S+Local is spawned as it was then: .*Restart the"
    with pytest.warns(StaleCodeWarning, match=warning):
        assert actor_class_to_spawn(Local)[1] is True


@pytest.mark.parametrize(
    ("Class", "message"),
    [
        (int, "must subclass monarch.service.Actor to spawn it"),
        (WithStop, "collides with an endpoint name"),
        (Mixed, "mixes both async and sync endpoints"),
    ],
)
def test_a_class_that_cannot_be_spawned_raises_monarchs_error(procs: ProcMeshProxy, Class: type, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        procs.spawn("name", Class)


def test_invalid_constructor_arguments_raise_at_once(procs: ProcMeshProxy) -> None:
    with pytest.raises(TypeError, match="too many positional arguments"):
        procs.spawn("counters", Counter, 1, 2)


def test_a_modules_class_is_sent_by_name_and_a_local_one_as_code(
    gateway: ScriptedGateway, procs: ProcMeshProxy
) -> None:
    class Local(Actor):
        @endpoint
        def here(self) -> int: ...

    received: list[bytes] = []
    gateway.on[SpawnActors] = lambda session, header, buffers: received.append(buffers[0].join())
    procs.spawn("counters", Counter)
    procs.spawn("local", Local)
    procs.initialized.get(timeout=20)
    assert pickle.loads(received[0]) is Counter
    assert len(received[0]) < 100
    assert b"here" in received[1]
    header = gateway.got(SpawnActors)[0]
    assert header.class_name == f"{Counter.__module__}.Counter"
    assert header.kind == "sync"
