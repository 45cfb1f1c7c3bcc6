"""Parsing; ``tests/end_to_end/test_agents.py`` calls."""

from __future__ import annotations

import signal
from typing import Any, cast

import pytest
import typer

from meshgate.cli.agents.call import Target, _Work, json_value, parse_target, parse_values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainers.step", Target("", "trainers", "step")),
        ("trainers.v2.step", Target("", "trainers.v2", "step")),
        ("pkg.model:Trainer.step", Target("pkg.model", "Trainer", "step")),
    ],
)
def test_a_target_names_actors_or_a_class(text: str, expected: Target) -> None:
    assert parse_target(text) == expected


@pytest.mark.parametrize("text", ["step", ".step", "trainers.", "t.a-b", ":Trainer.step", "m:a-b.step", "m:step"])
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"MESH\.ENDPOINT"):
        parse_target(text)


def test_a_call_that_a_signal_interrupts_while_it_is_made_is_cancelled() -> None:
    class Call:
        """An endpoint, and the result of its call."""

        cancelled = False

        def call(self) -> Call:
            signal.raise_signal(signal.SIGINT)
            return self

        def cancel(self) -> None:
            self.cancelled = True

        def exception(self, timeout: float) -> None:
            assert self.cancelled

    made = Call()
    work = _Work(cast("Any", None), Target("", "m", "e"), ([], {}), ([], {}), False, None, None, None)
    with pytest.raises(KeyboardInterrupt):
        work._value(made)
    assert made.cancelled


def test_values_are_json_with_or_without_a_name() -> None:
    assert parse_values(["1", '"a=b"', "lr=0.5", "names=[1, null]"]) == ([1, "a=b"], {"lr": 0.5, "names": [1, None]})
    assert parse_values(None) == ([], {})
    for text in ("hello", "lr=", "lr=x"):
        with pytest.raises(typer.BadParameter, match="needs double quotes"):
            parse_values([text])


@pytest.mark.parametrize(
    ("value", "expected", "text"),
    [
        ({"a": (1, 2.5)}, {"a": [1, 2.5]}, ""),
        (None, None, ""),
        ({1}, None, "{1}"),
        (float("nan"), None, "nan"),
    ],
)
def test_a_value_is_json_or_text(value: Any, expected: Any, text: str) -> None:
    found = json_value(3, value)
    assert (found.rank, found.value, found.text) == (3, expected, text)
