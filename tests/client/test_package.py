from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_origin, get_type_hints

import meshgate
from tests.client.laptop import run_without


def test_every_public_name_can_be_had() -> None:
    missing = [name for name in meshgate.__all__ if not hasattr(meshgate, name)]
    assert missing == []
    assert set(meshgate.__all__) <= set(dir(meshgate))


def test_type_checkers_see_the_names_that_programs_get() -> None:
    source = Path(meshgate.__file__).read_text()
    block = source.partition("if TYPE_CHECKING:")[2].partition("\n__version__")[0]
    imported = set(re.findall(r"\b(\w+)\b(?=[,\n])", re.sub(r"from [\w.]+ import", "", block).replace("(", "")))
    assert imported == set(meshgate.__all__) - {"unhandled_fault_hook"}


class Annotated:
    """As a program from Monarch is written."""

    def run(self, hosts: meshgate.HostMesh, procs: meshgate.ProcMesh, ctx: meshgate.Context) -> meshgate.Future[int]:
        raise NotImplementedError


def test_a_program_may_annotate_with_monarchs_names() -> None:
    hints = get_type_hints(Annotated.run)
    assert (hints["hosts"], hints["procs"]) == (meshgate.HostMeshProxy, meshgate.ProcMeshProxy)
    assert get_origin(hints["return"]) is meshgate.FutureProxy


def test_a_program_may_annotate_with_them_without_monarch() -> None:
    assert run_without("monarch", code="from meshgate import Context; print(Context.__module__)").split() == [
        b"meshgate.standins"
    ]


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(meshgate, "no_such_name")


def test_importing_it_loads_nothing_heavy() -> None:
    program = (
        "import sys, meshgate; "
        "print([name for name in sys.modules if name.split('.')[0] in "
        "('monarch', 'kubernetes', 'pydantic', 'websockets', 'cloudpickle', 'rich', 'typer', 'torch')])"
    )
    path = [str(Path(meshgate.__file__).parent.parent)]
    code = f"import sys; sys.path[:0] = {path!r}; {program}"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_client_needs_no_kubernetes() -> None:
    code = f"import sys; sys.path[:0] = {sys.path!r}; import meshgate.client; print('kubernetes' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
