from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_origin, get_type_hints

import monarch.actor
import pytest

import meshgate
from meshgate import errors
from meshgate.actors import api
from meshgate_sync.errors import TreeError
from tests.client.laptop import run_without


def test_every_public_name_is_available() -> None:
    missing = [name for name in meshgate.__all__ if not hasattr(meshgate, name)]
    assert missing == []
    assert set(meshgate.__all__) <= set(dir(meshgate))


def subclasses(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    """``kind`` and its subclasses, at any depth."""
    yield kind
    for subclass in kind.__subclasses__():
        yield from subclasses(subclass)


@pytest.mark.parametrize("root", [errors.MeshgateError, TreeError], ids=lambda root: root.__name__)
def test_every_error_that_a_documented_call_raises_is_public(root: type[BaseException]) -> None:
    ours = [kind for kind in subclasses(root) if kind.__module__ == root.__module__]
    assert [kind for kind in ours if getattr(meshgate, kind.__name__, None) is not kind] == []
    assert {kind.__name__ for kind in ours} <= set(meshgate.__all__)


def test_everything_else_in_the_error_module_is_public_too() -> None:
    assert set(errors.__all__) <= set(meshgate.__all__)


def test_type_checkers_see_the_names_that_programs_get() -> None:
    source = Path(meshgate.__file__).read_text()
    block = source.partition("if TYPE_CHECKING:")[2].partition("\n__version__")[0]
    imported = set(re.findall(r"\b(\w+)\b(?=[,\n])", re.sub(r"from [\w.]+ import", "", block).replace("(", "")))
    assert imported == set(meshgate.__all__) - {"unhandled_fault_hook"}


class Annotated:
    """Annotations of a program that was written for Monarch."""

    def run(self, hosts: meshgate.HostMesh, procs: meshgate.ProcMesh, ctx: meshgate.Context) -> meshgate.Future[int]:
        raise NotImplementedError


def test_a_program_may_annotate_with_monarchs_names() -> None:
    hints = get_type_hints(Annotated.run)
    assert (hints["hosts"], hints["procs"]) == (meshgate.HostMeshProxy, meshgate.ProcMeshProxy)
    assert get_origin(hints["return"]) is meshgate.Future
    assert issubclass(meshgate.FutureProxy, meshgate.Future)


def test_a_program_may_annotate_with_monarchs_names_without_monarch() -> None:
    assert run_without("monarch", code="from meshgate import Context; print(Context.__module__)").split() == [
        b"meshgate.actors.standins"
    ]


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(meshgate, "no_such_name")


JOB = (
    "monarch meshgate.actors meshgate.code_sync.push meshgate.images meshgate.mounts.remote meshgate.mounts.gather "
    "meshgate.proxies meshgate.serialization meshgate.session.dialing meshgate.session.session meshgate.shapes "
    "meshgate.transfer meshgate_sync meshgate_wire asyncio http.client kubernetes pydantic websockets cloudpickle rich "
    "typer torch"
)
"""What only a job that runs needs."""
SERVER = (
    "monarch kubernetes uvloop rich prometheus_client meshgate_gateway.engine meshgate_gateway.runs.runner "
    "meshgate_wire.session meshgate_wire.messages meshgate_kubernetes meshgate_slurm"
)
"""What the server of a local job does not need."""
IN_WORKER = "import meshgate.actors.api as api; api.in_worker_process = lambda: True; "


@pytest.mark.parametrize(
    ("statement", "needless"),
    [
        ("import meshgate", "monarch kubernetes pydantic websockets cloudpickle rich typer torch asyncio"),
        ("from meshgate import ProcessJob; ProcessJob({'workers': 2}, env={'A': '1'})", JOB),
        ("from meshgate import Actor, context, endpoint", "meshgate_wire meshgate.session pydantic websockets rich"),
        (IN_WORKER + "import tests.end_to_end.actors", "meshgate_wire meshgate.session.session pydantic numpy"),
        ("import meshgate.cli.app", "monarch kubernetes pydantic websockets cloudpickle torch asyncio meshgate_wire"),
        ("import meshgate.proxies.client", "kubernetes"),
        ("import meshgate_gateway.gateway, meshgate_gateway.settings", SERVER),
        ("import meshgate_gateway.engine.__main__", "monarch kubernetes pydantic_settings prometheus_client rich"),
        ("import meshgate_worker.__main__", "monarch pydantic asyncio logging meshgate_wire meshgate_sync"),
    ],
)
def test_an_import_loads_nothing_that_it_does_not_need(statement: str, needless: str) -> None:
    loaded = f"print(*sys.modules.keys() & {set(needless.split())!r})"
    code = f"import sys; sys.path[:0] = {sys.path!r}; {statement}; {loaded}"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == ""


@pytest.mark.parametrize("program", ["meshgate_gateway", "meshgate_gateway.engine"])
def test_a_program_of_the_gateway_imports_without_collecting_garbage(program: str) -> None:
    code = f"""
import gc, runpy, sys

sys.path[:0] = {sys.path!r}
sys.argv = ["program", "--help"]
collections = []
gc.callbacks.append(lambda *_: collections.append("pydantic" in sys.modules))
try:
    runpy.run_module({program!r}, run_name="__main__")
finally:
    print()
    print("pydantic" in sys.modules, any(collections), flush=True)
"""
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.splitlines()[-1] == "True False"


@pytest.mark.parametrize("name", sorted(meshgate._MONARCHS_IN_WORKERS))
def test_an_actor_that_imports_a_name_gets_monarchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(meshgate), name, raising=False)
    monkeypatch.setattr(api, "in_worker_process", lambda: True)
    assert getattr(meshgate, name) is getattr(monarch.actor, name, api.MonarchSupervisionError)
    monkeypatch.delitem(vars(meshgate), name)
    monkeypatch.setattr(api, "in_worker_process", lambda: False)
    assert getattr(meshgate, name).__module__.startswith("meshgate.")
