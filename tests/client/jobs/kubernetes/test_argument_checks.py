"""Conversions of arguments, and the errors that name them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError

from meshgate.jobs.kubernetes.argument_checks import (
    as_dict,
    as_json,
    as_tuple,
    reject_reserved_labels,
    selector_text,
    validation_text,
)


@pytest.mark.parametrize(("value", "converted"), [(None, ()), (["a"], ("a",)), (range(2), (0, 1))])
def test_an_iterable_becomes_a_tuple(value: Any, converted: tuple[Any, ...]) -> None:
    assert as_tuple("Compute", "secrets", value) == converted


@pytest.mark.parametrize("value", ["hf-token", b"x", {"a": 1}, 5])
def test_a_string_a_mapping_or_a_number_is_not_a_list(value: Any) -> None:
    with pytest.raises(TypeError, match=r"Compute\(secrets=.*\): expected a list, such as secrets=\[…\]"):
        as_tuple("Compute", "secrets", value)


def test_only_a_mapping_becomes_a_dict() -> None:
    assert as_dict("Compute", "labels", None) == {}
    with pytest.raises(TypeError, match=r"Compute\(labels=\['a'\]\): expected a mapping"):
        as_dict("Compute", "labels", ["a"])


def test_objects_of_the_kubernetes_package_become_json() -> None:
    class V1Thing:
        attribute_map = {"mount_path": "mountPath", "nothing": "nothing"}  # noqa: RUF012
        mount_path = "/data"
        nothing = None

    assert as_json([V1Thing(), {"a": (1, "b")}]) == [{"mountPath": "/data"}, {"a": [1, "b"]}]


def test_reserved_labels_are_rejected() -> None:
    reject_reserved_labels("add_mesh", {"app": "x"})
    with pytest.raises(ValueError, match=r"add_mesh\(labels\): 'meshgate.dev/mesh' is reserved for meshgate"):
        reject_reserved_labels("add_mesh", {"meshgate.dev/mesh": "x"})


def test_a_selector_is_text_or_a_mapping() -> None:
    assert selector_text("a in (b, c)") == "a in (b, c)"
    assert selector_text({"a": "b", "c": 1}) == "a=b,c=1"
    with pytest.raises(TypeError, match="the value of 'a' must be text, not True"):
        selector_text({"a": True})


def test_a_validation_error_names_each_argument() -> None:
    class Model(BaseModel):
        count: int = Field(ge=1)
        names: list[int]

    with pytest.raises(ValidationError) as raised:
        Model.model_validate({"count": 0, "names": ["a"]})
    first, second = validation_text("Job", raised.value).splitlines()
    assert first == "Job(count=0): Input should be greater than or equal to 1"
    assert second.startswith("Job(names.0='a'): Input should be a valid integer")
