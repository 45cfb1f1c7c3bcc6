"""The tree of exceptions: documented, picklable, readable, and caught by handlers for Python's own exceptions."""

from __future__ import annotations

import inspect
import pickle
import re
from typing import Any

import monarch.actor
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate import errors
from meshgate.errors import (
    ActorError,
    EngineDiedError,
    MeshFailure,
    MeshgateError,
    SupervisionError,
    UnpicklableArgument,
    copy_of,
    ranks_text,
    unpicklable_argument,
)
from tests.client.laptop import run_without

TREE = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, MeshgateError)]


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    documented: list[tuple[str, str]] = []
    parents = {-1: ""}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(
            r"^    ([│ ]*(?:[├└]── )?)(\w+(?:Error|Argument|Result|Importable|Fault|Running|Failed|Unsupported))\b",
            line,
        )
        if found:
            depth = len(found[1]) // 4
            documented.append((found[2], parents[depth - 1]))
            parents[depth] = found[2]
    real = [(kind.__name__, next(base.__name__ for base in kind.__bases__)) for kind in TREE]
    assert sorted(documented) == sorted((name, "" if name == "MeshgateError" else parent) for name, parent in real)


@pytest.mark.parametrize("kind", TREE)
def test_every_error_is_exported_and_survives_pickling(kind: type[MeshgateError]) -> None:
    assert kind.__name__ in errors.__all__
    error = kind(raised() if kind is ActorError else "something")  # type: ignore[arg-type]
    error.note = "kept"  # type: ignore[attr-defined]
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.note) == (kind, str(error), "kept")


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        (errors.SupervisionError, RuntimeError),
        (errors.StepFailedError, RuntimeError),
        (errors.InvalidRequestError, ValueError),
        (errors.UnpicklableArgument, TypeError),
        (errors.UnreadableResult, TypeError),
        (errors.ClassNotImportable, ImportError),
        (errors.ConnectionFailedError, ConnectionError),
    ],
)
def test_handlers_for_pythons_exceptions_catch_them(kind: type, also: type) -> None:
    assert issubclass(kind, also)


def raised() -> ValueError:
    try:
        raise ValueError("wrong batch")
    except ValueError as error:
        return error


def test_an_actor_error_equals_monarchs() -> None:
    exception = raised()
    ours, theirs = (
        ActorError(exception, "Actor call t.f failed."),
        monarch.actor.ActorError(exception, "Actor call t.f failed."),
    )
    assert str(ours) == str(theirs)
    for name in ("exception", "message", "exception_formatted", "args"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.__cause__ is exception
    assert ActorError(exception).message == monarch.actor.ActorError(exception).message


def test_an_actor_error_without_its_exception_is_readable() -> None:
    error = ActorError(None, "It failed.")
    assert (error.exception_formatted, error.__cause__) == ("", None)
    assert str(error).startswith("It failed.")


def test_an_actor_error_is_readable_without_monarch() -> None:
    output = run_without("monarch", code="from meshgate.errors import ActorError; print(ActorError(ValueError('x')))")
    assert output == b"A remote actor call has failed.\n ValueError: x\n\n"


def test_a_dead_engine_shows_its_last_output() -> None:
    error = EngineDiedError("killed by signal 9", "line 1\nline 2\n")
    assert "killed by signal 9" in str(error)
    assert str(error).endswith("Its last output:\nline 1\nline 2")
    assert "output" not in str(EngineDiedError("exit code 1"))
    assert str(EngineDiedError("the session's engine ended with exit code 3", "oh no\n")) == (
        "the session's engine ended with exit code 3. Its meshes are gone; the job is still running.\n"
        "Its last output:\noh no"
    )


def test_a_mesh_failure_names_ranks_mesh_and_hosts() -> None:
    failure = MeshFailure("trainers", "process 17 ended", (2, 3), {2: "workers-1", 3: "workers-1"})
    assert str(failure) == "ranks 2-3 of mesh 'trainers' on workers-1 failed: process 17 ended"
    assert failure.report() == "process 17 ended"
    assert str(MeshFailure("trainers", "gone")) == "part of mesh 'trainers' failed: gone"
    assert MeshFailure("trainers", "gone").mesh is None
    assert str(MeshFailure("", "gone", (0,), {0: ""})) == "rank 0 failed: gone"
    error = SupervisionError("it died", failure)
    assert pickle.loads(pickle.dumps(error)).failure == failure


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([3, 3], "rank 3"),
        ([0, 1, 2, 3, 9], "ranks 0-3, 9"),
        ([9, 1, 0], "ranks 0-1, 9"),
        ([1, 3, 5], "ranks 1, 3, 5"),
    ],
)
def test_ranks_are_abbreviated(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_many_ranks_are_named_up_to_a_number_of_sequences() -> None:
    ranks = [0, 1, 2, 5, 7, 8]
    assert ranks_text(ranks, 2) == "ranks 0-2, 5 and 2 more"
    assert ranks_text(ranks, 3) == "ranks 0-2, 5, 7-8"


@given(st.sets(st.integers(0, 200), min_size=1))
def test_abbreviated_ranks_contain_each_rank(ranks: set[int]) -> None:
    named: set[int] = set()
    for run in ranks_text(sorted(ranks)).partition(" ")[2].split(", "):
        first, _, last = run.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == ranks


def test_details_are_attributes() -> None:
    details: dict[type[Any], dict[str, Any]] = {
        errors.StepFailedError: {"step": "spawn of trainers"},
        errors.UnpicklableArgument: {"argument": "batch", "path": ".lock"},
        errors.UnreadableResult: {"module": "numpy"},
        errors.ClassNotImportable: {"module": "train"},
        errors.StaleCodeError: {"hosts": ("workers-0",)},
    }
    for kind, attributes in details.items():
        copy = pickle.loads(pickle.dumps(kind("text", **attributes)))
        assert {name: getattr(copy, name) for name in attributes} == attributes
        assert str(copy) == "text"


class BrokenState(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)


@pytest.mark.parametrize("raised", [RuntimeError, LookupError, BrokenState])
def test_what_pickling_raised_is_caught_as_that_too(raised: type[Exception]) -> None:
    kind = unpicklable_argument(raised)
    error = kind("cannot pickle argument 'value'", argument="value", path=".lock")
    assert isinstance(error, raised)
    assert isinstance(error, UnpicklableArgument)
    assert (str(error), error.argument, error.path) == ("cannot pickle argument 'value'", "value", ".lock")


@pytest.mark.parametrize("raised", [TypeError, Exception, OSError, UnicodeDecodeError])
def test_classes_that_add_nothing_or_cannot_be_combined_are_left_out(raised: type[Exception]) -> None:
    assert unpicklable_argument(raised)("no").argument == ""


def test_a_copy_of_an_error_has_all_but_its_traceback() -> None:
    with pytest.raises(EngineDiedError) as caught:
        raise EngineDiedError("killed", "last words") from OSError("no memory")
    error: Any = caught.value
    error.__notes__ = ["the first try"]  # add_note() of Python 3.11
    copied = copy_of(error)
    assert (type(copied), str(copied), copied.output) == (EngineDiedError, str(error), "last words")
    assert (copied.__cause__, copied.__notes__) == (error.__cause__, ["the first try"])
    assert copied.__traceback__ is None
