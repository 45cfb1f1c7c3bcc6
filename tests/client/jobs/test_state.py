from __future__ import annotations

import copy
import pickle

import pytest

from meshgate.jobs import JobState


def test_each_mesh_is_an_attribute() -> None:
    state = JobState({"trainers": 1, "dataloaders": 2})
    assert (state.trainers, state.dataloaders) == (1, 2)
    assert {"trainers", "dataloaders"} <= set(dir(state))


def test_an_unknown_mesh_is_told_in_monarchs_words() -> None:
    with pytest.raises(AttributeError) as raised:
        JobState({"b": 1, "a": 2}).nobody  # noqa: B018
    assert str(raised.value) == "'nobody' is not a valid host mesh name. Available names: a, b"


def test_copies_and_pickles() -> None:
    state = JobState({"a": 1})
    assert copy.copy(state).a == 1
    assert pickle.loads(pickle.dumps(state)).a == 1


def test_shows_its_meshes() -> None:
    assert repr(JobState({"a": 1})) == "JobState(hosts={'a': 1})"
