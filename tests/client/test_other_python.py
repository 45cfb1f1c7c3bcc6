"""The workers run another Python minor version: names travel, code does not, and the refusal says both."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from meshgate.actors import Actor, endpoint
from meshgate.client import Client
from meshgate.dialing import UrlDialer
from meshgate.errors import UnpicklableArgument, UnreadableResult
from meshgate.settings import ClientSettings
from meshgate_wire.messages import Call, SpawnActors, SpawnProcs
from tests.client.counting import Counter
from tests.client.fake_gateway import TOKEN, FakeGateway

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def hosts(gateway: FakeGateway, settings: ClientSettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("meshgate_wire.handshake.PYTHON_VERSION", "3.9.18")
    with Client(UrlDialer(gateway.url, TOKEN), settings=settings) as client:
        yield client.attach_hosts("workers", 2)


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def local_class() -> Any:
    class Local(Actor):
        @endpoint
        def nothing(self) -> None: ...

    return Local


def test_a_class_that_travels_as_code_is_refused_with_both_versions(hosts: Any, gateway: FakeGateway) -> None:
    procs = hosts.spawn_procs()
    with pytest.raises(UnpicklableArgument, match=rf"Local would .* Python {HERE} can run; the workers run 3\.9\."):
        procs.spawn("local", local_class())
    assert gateway.got(SpawnActors) == []


def test_functions_in_arguments_and_bootstraps_are_refused(hosts: Any, gateway: FakeGateway) -> None:
    counters = hosts.spawn_procs().spawn("counters", Counter)
    with pytest.raises(UnpicklableArgument, match=r"the workers run 3\.9"):
        counters.add.call(lambda: 1)
    with pytest.raises(UnpicklableArgument, match=r"the workers run 3\.9"):
        hosts.spawn_procs(bootstrap=lambda: None)
    assert gateway.got(Call) == []
    assert len(gateway.got(SpawnProcs)) <= 1


def test_what_travels_by_name_goes_through(hosts: Any, gateway: FakeGateway) -> None:
    gateway.functions["add"] = lambda rank, n: n + 1
    counters = hosts.spawn_procs().spawn("counters", Counter)
    assert list(counters.add.call(1).get(timeout=20).values()) == [2, 2]


def test_a_result_that_cannot_be_read_names_the_call(hosts: Any, gateway: FakeGateway) -> None:
    gateway.functions["add"] = lambda rank, n: Unreadable()
    counters = hosts.spawn_procs().spawn("counters", Counter)
    with pytest.raises(UnreadableResult, match=r"^counters\.add: ") as caught:
        counters.add.call(1).get(timeout=20).item(hosts=0)
    assert caught.value.endpoint == "counters.add"
