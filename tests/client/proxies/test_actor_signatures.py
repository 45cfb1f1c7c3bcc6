from __future__ import annotations

import inspect
from typing import Any

import pytest

from meshgate import Actor, endpoint
from meshgate.actors.actor_class import endpoints_of
from meshgate.proxies.actor_signatures import actor_class_from, signatures_of
from meshgate_wire.messages import MeshRef, SpawnActors


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


UNPRINTABLE = Unprintable()


class Trainer(Actor):
    @endpoint
    def step(self, batch: int, *rest: Any, rate: float = 0.5, how: Any = UNPRINTABLE, **more: Any) -> str:
        return ""

    @endpoint(explicit_response_port=True)
    def through_port(self, port: Any, value: int) -> None:
        pass


def spawned(class_name: str) -> SpawnActors:
    signatures = signatures_of(endpoints_of(Trainer))
    header = SpawnActors(
        object=3, procs=MeshRef(object=2), name="t", class_name=class_name, kind="sync", endpoints=signatures
    )
    return SpawnActors.model_validate_json(header.model_dump_json())


def test_endpoints_have_the_signatures_that_they_were_spawned_with() -> None:
    original = endpoints_of(Trainer)
    rebuilt = actor_class_from(spawned(original.name))
    assert rebuilt.Class is Trainer
    assert sorted(rebuilt.endpoints) == ["step", "through_port"]
    step = rebuilt.endpoints["step"]
    assert list(step.signature.parameters) == ["self", "batch", "rest", "rate", "how", "more"]
    assert str(step.signature).startswith("(self, batch: 'int', *rest: 'Any', rate: 'float' = 0.5, how: 'Any' = <")
    for name, spec in rebuilt.endpoints.items():
        before = original.endpoints[name]
        assert (spec.parameters, spec.placeholders) == (before.parameters, before.placeholders)
        assert spec.explicit_response_port == before.explicit_response_port
        assert spec.valid_counts == before.valid_counts
    step.check((1, 2, 3), {"rate": 1.0, "other": 2})
    with pytest.raises(TypeError, match="batch"):
        step.check((), {})


def test_a_class_that_is_not_imported_here_has_a_stand_in() -> None:
    rebuilt = actor_class_from(spawned("project.of.someone.Else"))
    assert rebuilt.Class.__name__ == "Else"
    assert rebuilt.Class.__module__ == "project.of.someone"
    assert inspect.isclass(rebuilt.Class)
