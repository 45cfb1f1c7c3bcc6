"""Workers with another Python minor version receive names and source but no bytecode; the error names both versions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from meshgate.actors.api import Actor, endpoint
from meshgate.errors import UnpicklableArgument, UnreadableResult
from meshgate.proxies.client import Client
from meshgate.session.dialing import UrlDialer
from meshgate.session.settings import ClientSettings
from meshgate_wire.messages import Call, SpawnActors, SpawnProcs
from tests.client.counting import Counter
from tests.client.scripted_gateway import TOKEN, ScriptedGateway

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def hosts(gateway: ScriptedGateway, settings: ClientSettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("meshgate_wire.handshake.PYTHON_VERSION", "3.9.18")
    with Client(UrlDialer(gateway.url, TOKEN), settings=settings) as client:
        yield client.attach_hosts("workers", 2)


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def without_source(code: str, name: str) -> Any:
    """What ``code``, which is in no file, defines as ``name``."""
    namespace = {"Actor": Actor, "endpoint": endpoint, "__name__": "__main__"}
    exec(code, namespace)
    return namespace[name]


LOCAL = """
class Local(Actor):
    @endpoint
    def nothing(self): ...
"""


def test_a_class_by_value_is_rejected_and_both_versions_are_named(hosts: Any, gateway: ScriptedGateway) -> None:
    procs = hosts.spawn_procs()
    with pytest.raises(UnpicklableArgument, match=rf"Python {HERE} only, the workers run 3\.9,"):
        procs.spawn("local", without_source(LOCAL, "Local"))
    assert gateway.got(SpawnActors) == []


def test_functions_in_arguments_and_bootstraps_are_rejected(hosts: Any, gateway: ScriptedGateway) -> None:
    counters = hosts.spawn_procs().spawn("counters", Counter)
    function = without_source("function = lambda: 1", "function")
    with pytest.raises(UnpicklableArgument, match=r"the workers run 3\.9"):
        counters.add.call(function)
    with pytest.raises(UnpicklableArgument, match=r"the workers run 3\.9"):
        hosts.spawn_procs(bootstrap=function)
    assert gateway.got(Call) == []
    assert len(gateway.got(SpawnProcs)) <= 1


def test_classes_by_name_are_sent(hosts: Any, gateway: ScriptedGateway) -> None:
    gateway.functions["add"] = lambda rank, n: n + 1
    counters = hosts.spawn_procs().spawn("counters", Counter)
    assert list(counters.add.call(1).get(timeout=20).values()) == [2, 2]


def test_the_error_of_an_unreadable_result_names_the_call(hosts: Any, gateway: ScriptedGateway) -> None:
    gateway.functions["add"] = lambda rank, n: Unreadable()
    counters = hosts.spawn_procs().spawn("counters", Counter)
    with pytest.raises(UnreadableResult, match=r"^counters\.add: ") as caught:
        counters.add.call(1).get(timeout=20).item(hosts=0)
    assert caught.value.endpoint == "counters.add"
