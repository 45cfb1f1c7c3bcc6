"""Stand-ins keep the name, the arguments and the state of exceptions that cannot be imported."""

from __future__ import annotations

import pickle

import pytest

from meshgate.serialization.exception_standins import ExceptionStandIn, stand_in_for


def test_a_stand_in_has_the_name_of_the_class() -> None:
    kind = stand_in_for("cuda_errors", "Outer.CudaError")
    assert issubclass(kind, ExceptionStandIn)
    assert (kind.__module__, kind.__qualname__, kind.__name__) == ("cuda_errors", "Outer.CudaError", "CudaError")
    assert stand_in_for("cuda_errors", "Outer.CudaError") is kind
    assert stand_in_for("other_errors", "Outer.CudaError") is not kind


@pytest.mark.parametrize("kind", [ExceptionStandIn, stand_in_for("cuda_errors", "CudaError")])
def test_a_stand_in_survives_pickling(kind: type[ExceptionStandIn]) -> None:
    error = kind("out of memory", 3)
    error.device = 1  # type: ignore[attr-defined]
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.args, vars(copy)) == (kind, ("out of memory", 3), {"device": 1})


@pytest.mark.parametrize(
    ("state", "attributes"),
    [
        ({"a": 1}, {"a": 1}),
        (({"a": 1}, {"slot": 2}), {"a": 1, "slot": 2}),
        ((None, {"slot": 2}), {"slot": 2}),
        ({5: "key that is not a string"}, {"5": "key that is not a string"}),
        ("text", {}),
        ((1, 2, 3), {}),
    ],
)
def test_a_stand_in_accepts_any_state(state: object, attributes: dict[str, object]) -> None:
    error = ExceptionStandIn()
    error.__setstate__(state)
    assert vars(error) == attributes


def test_a_stand_in_for_a_class_makes_instances() -> None:
    assert stand_in_for("m", "Meta")("name")("argument").args == ("argument",)


def test_a_stand_in_for_a_container_keeps_its_items() -> None:
    error = ExceptionStandIn()
    error["key"] = "value"
    error.append(1)
    error.extend([2, 3])
    assert vars(error) == {"items": {"key": "value"}, "elements": [1, 2, 3]}
