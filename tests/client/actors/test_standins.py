"""The stand-ins behave as Monarch's Actor and endpoint do outside an actor."""

from __future__ import annotations

import monarch.actor
import pytest

from meshgate.actors import standins


def test_concurrent_endpoint_rejects_what_monarch_rejects() -> None:
    for kit in (monarch.actor, standins):
        with pytest.raises(ValueError, match="concurrent_endpoint does not wrap @endpoint"):
            kit.concurrent_endpoint(kit.endpoint(lambda self: None))
        with pytest.raises(ValueError, match="concurrent_endpoint can only wrap async endpoints"):
            kit.concurrent_endpoint(lambda self: None)


class Trainer(standins.Actor): ...


def test_a_stand_in_actor_is_not_a_mesh() -> None:
    actor = Trainer()
    for operation in (lambda: actor.slice(gpus=0), actor.stop, lambda: actor.initialized, lambda: len(actor)):
        with pytest.raises(NotImplementedError, match="an actor is not a mesh"):
            operation()
    assert actor.logger.name == "Trainer"
