from __future__ import annotations

import pickle
from typing import Any

import pytest

from meshgate.actors.api import MonarchActorError
from meshgate.errors import UnreadableResult
from meshgate.serialization.unpickling import ReadingRules
from meshgate.session.results import ResultReader
from meshgate_wire import Fragments
from meshgate_wire.messages import Adopted, ErrorGroup, Failure


class NoProxies:
    """Fails on every mesh and port in a result."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


@pytest.fixture
def reader() -> ResultReader:
    return ResultReader(NoProxies(), ReadingRules)  # type: ignore[arg-type]


def pickled(value: object) -> Fragments:
    return Fragments((pickle.dumps(value),))


def test_values_are_unpickled(reader: ResultReader) -> None:
    assert reader.value(pickled([1, 2]), Adopted(), "counters.count") == [1, 2]


def test_the_error_of_an_unreadable_value_names_the_endpoint(reader: ResultReader) -> None:
    with pytest.raises(UnreadableResult, match=r"^counters\.count: ") as caught:
        reader.value(pickled(Unreadable()), Adopted(), "counters.count")
    assert caught.value.endpoint == "counters.count"


def test_errors_are_unpickled(reader: ResultReader) -> None:
    failure = Failure(kind="actor", message="failed", errors=(ErrorGroup(ranks=(0,), count=1, buffer=0),), total=1)
    error = reader.error(failure, [pickled(MonarchActorError(KeyError("x"), "failed"))], "counters.add")
    assert isinstance(error.__cause__, KeyError)
    assert "counters.add failed" in str(error)


def test_an_exception_sent_as_a_message_is_unpickled(reader: ResultReader) -> None:
    assert isinstance(reader.raised(pickled(KeyError("x")), Adopted()).exception, KeyError)
