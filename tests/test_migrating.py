"""The pairs of programs on the pages about migrating print the same before and after.

Those for Ray run through Ray Client on a cluster of one node, with the Ray of this Python, of the benchmarks' venv, or
of the Python that MESHGATE_TEST_RAY_PYTHON names.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers.ray_client import cluster
from tests.documents import programs_in, python_blocks
from tests.ports import free_port
from tests.programs import LEAVE_MONARCH, ROOT, run_program


def pairs(document: str) -> list[tuple[str, str]]:
    programs = programs_in(document)
    return list(zip(programs[::2], programs[1::2], strict=True))


FROM_MONARCH = pairs("docs/migrating_monarch.md")
FROM_RAY = pairs("docs/migrating_ray.md")
*PLAIN, DETACHED, SUBMITTED = FROM_RAY
RAY_PRINTS = [
    "[5, 5, 5, 5]\n6\n",
    "[0, 1, 4, 9, 16, 25, 36, 49]\n",
    "a shard has 499501\n" * 2,
    "[100.0, 100.0]\n100\n",
    "failed: division by zero\n0.5\n",
]


@pytest.mark.timeout(600)  # two programs
@pytest.mark.parametrize(
    ("pair", "prints"),
    list(
        zip(
            FROM_MONARCH,
            [
                "[30, 31, 32, 33]\n",
                "failed: integer division or modulo by zero\n[2, 2]\n",
                "[0, 1, 2, 100, 101, 102]\n",
            ],
            strict=True,
        )
    ),
    ids=["job", "this_host", "channels"],
)
def test_programs_for_monarch_and_meshgate_print_the_same(pair: tuple[str, str], prints: str, tmp_path: Path) -> None:
    assert run_program(pair[0] + LEAVE_MONARCH, tmp_path, strict=False) == prints
    assert run_program(pair[1], tmp_path) == prints


@pytest.mark.parametrize(("pair", "prints"), list(zip(PLAIN, RAY_PRINTS, strict=True)))
def test_programs_that_left_ray_print_what_they_did(pair: tuple[str, str], prints: str, tmp_path: Path) -> None:
    assert run_program(pair[1], tmp_path) == prints


@pytest.mark.timeout(900)  # three programs
def test_a_program_that_left_ray_finds_its_actor_again(tmp_path: Path) -> None:
    try:
        assert run_program(DETACHED[1], tmp_path) == "5\n"
        assert run_program(DETACHED[1], tmp_path) == "10\n"
    finally:
        run_program("from meshgate import job_load\njob_load('.monarch/job_state.pkl').kill()\n", tmp_path)


# Of a submitted program, besides what Ray and meshgate say about it themselves.
SUBMITTED_PRINTS = [*RAY_PRINTS[0].splitlines(), "succeeded"]


def test_a_program_that_left_ray_runs_in_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN[0][1])
    printed = run_program(SUBMITTED[1], tmp_path)
    assert [line for line in printed.splitlines() if line in SUBMITTED_PRINTS] == SUBMITTED_PRINTS, printed


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """A Python with Ray, the address of a Ray Client server, and the URL of the server of its cluster for jobs."""
    here = sys.executable if importlib.util.find_spec("ray") else str(ROOT / ".venv-bench/bin/python")
    python = os.environ.get("MESHGATE_TEST_RAY_PYTHON", here)
    if not Path(python).exists():
        pytest.skip("Ray is not installed: make bench installs it into .venv-bench")
    port = next(port for port in iter(free_port, 0) if port >= 20_000)  # Ray gives its workers those below
    with cluster(python, tmp_path_factory.mktemp("ray") / "ray.log", dashboard_port=port) as address:
        yield python, address, f"http://127.0.0.1:{port}"


# A connection takes Ray 15 s or more on a busy machine, so the programs share one.
RUN_CONNECTED = """
import ray, runpy, sys
ray.init(sys.argv[1], namespace="counting")
ray.init = lambda *arguments, **options: None
for program in sys.argv[2:]:
    runpy.run_path(program, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # a limit on a hang: two connections to Ray, and one that waits until it accepts them
def test_programs_for_ray_client_print_the_same(ray: tuple[str, str, str], tmp_path: Path) -> None:
    python, address, _ = ray
    programs = [program for program, _ in [*PLAIN, DETACHED]]
    for number, program in enumerate(programs):
        (tmp_path / f"{number}.py").write_text(program)
    *plain, detached = [str(tmp_path / f"{number}.py") for number in range(len(programs))]

    def run(*programs: str) -> str:
        command = [python, "-c", RUN_CONNECTED, f"ray://{address}", *programs]
        for _ in range(3):  # a busy Ray may refuse a client before it runs: psutil.ZombieProcess in its proxy
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
            if "Initialization failure from server" not in done.stderr:
                break
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(*plain, detached) == "".join(RAY_PRINTS) + "5\n"
    assert run(detached) == "10\n"


@pytest.mark.slow
@pytest.mark.timeout(900)  # as above
def test_a_program_that_is_submitted_to_ray_prints_the_same(ray: tuple[str, str, str], tmp_path: Path) -> None:
    python, _, jobs = ray
    (tmp_path / "train.py").write_text(PLAIN[0][0].replace('"ray://cluster:10001"', ""))
    program = SUBMITTED[0].replace("http://cluster:8265", jobs).replace("python train.py", f"{python} train.py")
    for _ in range(6):  # on a busy machine, the part of Ray that starts jobs takes longer than Ray waits for it
        done = subprocess.run([python, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
        if "No available agent" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    printed = done.stdout.lower().splitlines()
    assert [line for line in printed if line in SUBMITTED_PRINTS] == SUBMITTED_PRINTS, done.stdout


def test_a_program_for_kubetorch_changes_only_its_imports() -> None:
    kubetorch, meshgate = (block.code for block in python_blocks(ROOT / "docs/migrating_kubetorch.md")[:2])
    changed = [pair for pair in zip(kubetorch.splitlines(), meshgate.splitlines(), strict=True) if pair[0] != pair[1]]
    assert len(changed) == 3
    assert all(" import " in line or line.startswith("import ") for pair in changed for line in pair)
