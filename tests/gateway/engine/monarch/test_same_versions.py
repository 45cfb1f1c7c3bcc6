from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from meshgate_gateway.engine.monarch import same_versions
from meshgate_gateway.engine.monarch.same_versions import SameVersions, version_problem, versions_of
from meshgate_wire import Hello, Limits, PeerLimits

UNPICKLED: list[str] = []


@dataclass
class Arguments:
    name: str
    function: Any


class Function:
    """Notes that it was unpickled, which crashes a process with another version of Python."""

    def __reduce__(self) -> Any:
        return note, ("function",)


def note(name: str) -> None:
    UNPICKLED.append(name)


def test_arguments_arrive_in_a_process_with_the_same_versions() -> None:
    SameVersions().check_before(Arguments)
    assert pickle.loads(pickle.dumps(Arguments("worker", [1, 2]))) == Arguments("worker", [1, 2])


def test_with_other_versions_nothing_else_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    same = SameVersions()
    same.laptop = lambda: "the laptop has Python 3.10.4 and no torchmonarch"
    same.check_before(Arguments)
    monkeypatch.setattr(same_versions, "PYTHON_VERSION", "3.9.1")
    data = pickle.dumps(Arguments("worker", Function()))
    with pytest.raises(RuntimeError, match=r"gateway has Python 3\.9\.1 .*the laptop has Python 3\.10\.4"):
        pickle.loads(data)
    assert UNPICKLED == []


def test_a_problem_is_found_in_a_report() -> None:
    assert version_problem("failed:\n  RuntimeError: worker w-0 has Python 3.12.1 and so on\nmore").endswith("so on")
    assert version_problem("failed:\n  RuntimeError: worker w-0 is tired") == ""


def test_the_versions_of_a_laptop_are_those_of_its_hello() -> None:
    hello = Hello(
        protocol=2, role="client", software="0.1.0", python="3.10.4", received=0, limits=PeerLimits.of(Limits())
    )
    assert versions_of(hello) == "the laptop has Python 3.10.4 and no torchmonarch"
    with_monarch = hello.model_copy(update={"monarch": "0.8.0.dev1"})
    assert versions_of(with_monarch) == "the laptop has Python 3.10.4 and torchmonarch 0.8.0.dev1"
    assert versions_of(None) == "no laptop is connected"
