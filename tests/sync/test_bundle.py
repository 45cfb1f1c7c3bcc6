from __future__ import annotations

import ast
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from meshgate_sync import bundle as bundle_module
from meshgate_sync.bundle import MODULES, bundle

SOURCES = Path(bundle_module.__file__).parent
OURS = set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_what_a_host_runs_imports_nothing_but_the_standard_library(name: str) -> None:
    for node in ast.walk(ast.parse((SOURCES / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            assert all(alias.name.split(".")[0] in sys.stdlib_module_names for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            if node.level:
                assert node.module in OURS
            else:
                assert node.module.split(".")[0] in sys.stdlib_module_names


def test_the_bundle_is_the_same_each_time() -> None:
    assert bundle() == bundle()
    assert {info.filename for info in zipfile.ZipFile(io.BytesIO(bundle())).infolist()} == {
        f"meshgate_sync/{name}.py" for name in MODULES
    }


def test_a_host_starts_from_the_bundle_alone(tmp_path: Path) -> None:
    import inspect

    (tmp_path / "bundle").write_bytes(bundle())
    program = (
        "from __future__ import annotations\n"
        "from collections.abc import Mapping\nfrom typing import Any\n"
        f"{inspect.getsource(bundle_module.start)}\n"
        f"data = open({str(tmp_path / 'bundle')!r}, 'rb').read()\n"
        f"settings = dict(name='h', secret=b's', owner='o', home={str(tmp_path / 'home')!r})\n"
        "agent = start(data, settings)\n"
        "again = start(data, settings)\n"
        "import meshgate_sync, sys\n"
        "assert '.zip' in meshgate_sync.__file__, meshgate_sync.__file__\n"
        "assert agent.address[1] != again.address[1]\n"
        "agent.stop(); again.stop()\n"
        "third_party = [name for name in sys.modules if name.split('.')[0] in ('blake3', 'zstandard', 'pydantic')]\n"
        "assert not third_party, third_party\n"
    )
    environment = {"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-I", "-c", program], check=True, env=environment, timeout=60)
