"""Errors about wrong names say which names exist, and which one was probably meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from meshgate.suggestions import closest, did_you_mean, names_text, wrong_arguments


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("trian_step", ["evaluate", "train_step"], "train_step"),
        ("kubernetesjob", ["KubernetesJob", "SlurmJob"], "KubernetesJob"),
        ("elsewhere", ["evaluate", "train_step"], ""),
        ("stepp", ["_step", "__step__"], ""),
        ("step", [], ""),
        ("x" * 101, ["x" * 102], ""),
    ],
)
def test_the_most_similar_public_name_is_found(name: str, known: list[str], found: str) -> None:
    assert closest(name, known) == found
    assert did_you_mean(name, known) == (f". Did you mean {found!r}?" if found else "")


def test_at_most_twenty_names_are_listed() -> None:
    assert names_text(["step", "evaluate"]) == "step, evaluate"
    assert names_text(map(str, range(22))).endswith("18, 19 and 2 more")


def step(self: Any, batch_size: int, *rest: int, rate: float = 1.0) -> None: ...


def anything(self: Any, batch_size: int, **more: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "kwargs", "text"),
    [
        (
            step,
            {"batchsize": 3},
            "missing a required argument: 'batch_size'. 'batchsize' is not a parameter. Did you mean 'batch_size'?",
        ),
        (
            step,
            {"batch_size": 3, "batchsize": 3},
            "got an unexpected keyword argument 'batchsize'. The parameters: batch_size, rate",
        ),
        (
            step,
            {"a": 1, "b": 2},
            "missing a required argument: 'batch_size'. 'a', 'b' are not parameters. The parameters: batch_size, rate",
        ),
        (step, {}, "missing a required argument: 'batch_size'"),
        (lambda self: None, {"a": 1}, "got an unexpected keyword argument 'a'. The parameters: none"),
        (anything, {"batchsize": 3}, "missing a required argument: 'batch_size'"),
    ],
)
def test_a_keyword_that_is_not_a_parameter_is_named(
    function: Callable[..., None], kwargs: dict[str, Any], text: str
) -> None:
    signature = inspect.signature(function)
    with pytest.raises(TypeError) as caught:
        signature.bind(None, **kwargs)
    assert wrong_arguments(caught.value, signature, kwargs) == text
