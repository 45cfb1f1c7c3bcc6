from __future__ import annotations

import copy
import pickle
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from meshgate.jobs import state as state_module
from meshgate.jobs.state import JobState, attach_meshes


def test_every_mesh_is_an_attribute() -> None:
    state = JobState({"trainers": 1, "dataloaders": 2})
    assert (state.trainers, state.dataloaders) == (1, 2)
    assert {"trainers", "dataloaders"} <= set(dir(state))


def test_an_unknown_mesh_has_monarchs_error_message() -> None:
    with pytest.raises(AttributeError) as raised:
        JobState({"b": 1, "a": 2}).absent  # noqa: B018
    assert str(raised.value) == "'absent' is not a valid host mesh name. Available names: a, b"


def test_a_state_can_be_copied_and_pickled() -> None:
    state = JobState({"a": 1})
    assert copy.copy(state).a == 1
    assert pickle.loads(pickle.dumps(state)).a == 1


def test_the_repr_shows_the_meshes() -> None:
    assert repr(JobState({"a": 1})) == "JobState(hosts={'a': 1})"


class Waited:
    """A host mesh that takes ``lasts`` seconds until it is there."""

    def __init__(self, clock: list[float], lasts: float) -> None:
        self.clock, self.lasts, self.initialized = clock, lasts, self
        self.timeouts: list[float] = []

    def get(self, timeout: float) -> None:
        self.timeouts.append(timeout)
        self.clock[0] += min(self.lasts, timeout)
        if self.lasts > timeout:
            raise TimeoutError


def test_all_meshes_are_waited_for_within_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(state_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    first, second = Waited(clock, 4.0), Waited(clock, 7.0)
    meshes: Any = {"first": first, "second": second}
    JobState(meshes)._wait_for_hosts(11.0)
    assert (first.timeouts, second.timeouts) == ([11.0], [7.0])
    with pytest.raises(TimeoutError):
        JobState(meshes)._wait_for_hosts(10.0)


class FakeMesh:
    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.usable = name, size, True

    def is_usable_in(self, client: Any) -> bool:
        return self.usable

    def __len__(self) -> int:
        return self.size


class FakeClient:
    def __init__(self) -> None:
        self.objects = SimpleNamespace(host_restarts=Counter())

    def attach_hosts(self, name: str, size: int) -> FakeMesh:
        return FakeMesh(name, size)


def attach(meshes: dict[str, int], previous: Any = None, client: FakeClient | None = None) -> Any:
    return attach_meshes(client or FakeClient(), meshes, previous)  # type: ignore[arg-type]


def test_usable_meshes_are_kept_and_others_attached_again() -> None:
    first = attach({"trainers": 2, "readers": 1})
    assert (first.trainers.size, first.readers.size) == (2, 1)
    assert attach({"trainers": 2, "readers": 1}, first) is first
    first.readers.usable = False
    second = attach({"trainers": 2, "readers": 1}, first)
    assert second.trainers is first.trainers
    assert second.readers is not first.readers


def test_a_mesh_that_the_job_no_longer_has_is_dropped() -> None:
    first = attach({"trainers": 2, "readers": 1})
    second = attach({"trainers": 2}, first)
    assert second is not first
    assert dir(second).count("readers") == 0


def test_a_mesh_of_another_size_is_attached_again_and_has_hosts_that_have_nothing_yet() -> None:
    client = FakeClient()
    first = attach({"trainers": 2, "readers": 1}, client=client)
    second = attach({"trainers": 3, "readers": 1}, first, client)
    assert (second.trainers.size, first.trainers.size) == (3, 2)
    assert second.readers is first.readers
    assert client.objects.host_restarts == {"trainers": 1}
