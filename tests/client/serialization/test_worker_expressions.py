"""Expressions evaluate on a worker to Monarch's objects."""

from __future__ import annotations

import json
import pickle
from pkgutil import resolve_name
from typing import Any

import monarch.actor
import pytest

import meshgate
from meshgate.serialization.worker_expressions import (
    WORKER_NAMES,
    WorkerExpression,
    module_on_worker,
    monarch_object,
    reduce_to_call,
)
from tests.client.laptop import run_without


class Reduced:
    """An object with a given pickle reduction."""

    def __init__(self, reduction: tuple[Any, ...]) -> None:
        self._reduction = reduction

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduction


def test_worker_names_exist_in_monarch() -> None:
    for name, path in WORKER_NAMES.items():
        assert resolve_name(path).__name__ in (name, "Future"), name


def test_an_expression_is_evaluated_by_the_unpickler() -> None:
    expression = WorkerExpression(divmod, 7, WorkerExpression(int, "2"))
    assert pickle.loads(pickle.dumps(expression)) == (3, 1)
    with pytest.raises(TypeError, match="evaluated on workers only"):
        expression()


def test_a_monarch_object_unpickles_as_the_object() -> None:
    assert pickle.loads(pickle.dumps(monarch_object("ValueMesh"))) is monarch.actor.ValueMesh


def test_a_call_is_reduced_with_keyword_arguments() -> None:
    reduction = reduce_to_call(WorkerExpression(getattr, dict, "fromkeys"), "ab", 0)
    assert pickle.loads(pickle.dumps(Reduced(reduction))) == {"a": 0, "b": 0}
    assert pickle.loads(pickle.dumps(Reduced(reduce_to_call(sorted, [1, 2], reverse=True)))) == [2, 1]


def test_only_modules_of_meshgate_are_reduced() -> None:
    assert module_on_worker(json) is None
    reduction = module_on_worker(meshgate)
    assert reduction is not None
    assert pickle.loads(pickle.dumps(Reduced(reduction))) is meshgate


def test_meshgate_is_monarch_actor_on_a_worker_without_meshgate() -> None:
    reduction = module_on_worker(meshgate)
    assert reduction is not None
    code = """
        import importlib.util, pickle
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name: None if name == "meshgate" else found(name)
        print(pickle.loads(sys.stdin.buffer.read()).__name__)
    """
    assert run_without(code=code, stdin=pickle.dumps(Reduced(reduction))) == b"monarch.actor\n"
