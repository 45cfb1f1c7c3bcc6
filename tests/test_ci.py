"""``.ci/run`` in a clone whose programs only write down that they ran."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from meshgate_processes.identity import identify_process
from tests.programs import ROOT

MAKE = """#!/bin/sh
echo "make $* ($KUBECONFIG $MESHGATE_WORKER_IMAGE $SLURM_CONF $DOCKER_HOST)" >>"$RAN"
echo "make prints $*"
case "$*" in
*"${HANGS:-nothing}"*) echo $$ >"$RAN.hangs"; exec sleep 600 ;;
esac
case "$*" in
*"${AWAITS_CLUSTERS:-nothing}"*) until grep -q failed build/ci/clusters.log; do sleep 0.1; done ;;
esac
case "$*" in
*"${FAILS:-nothing}"*)
    # Not before it sleeps: a shell that gets SIGINT as it starts a program may ignore it.
    while [ -n "$HANGS" ] && ! grep -qs sleep "/proc/$(cat "$RAN.hangs" 2>/dev/null)/comm"; do sleep 0.1; done
    exit 3
    ;;
esac
"""
UP = '#!/bin/sh\necho "$0" >>"$RAN"\n[ "$UP_FAILS" != {name} ] || exit 4\necho {name}-address\n'
IMAGES = '#!/bin/sh\necho images >>"$RAN"\necho \'export MESHGATE_WORKER_IMAGE="the worker"\'\n'
KUBECTL = """#!/bin/sh
echo "kubectl $*" >>"$RAN"
case "$1 ${NO_PODS:-}" in
"run once") [ "$(grep -c '^kubectl run' "$RAN")" != 1 ] ;;
"run ever") exit 1 ;;
esac
"""
DOWN = '#!/bin/sh\necho "$0" >>"$RAN"\n'
PATH_OF_A_CALL = '#!/bin/sh\necho "python $*" >>"$RAN"\n'
KITS = ("kubernetes", "slurm", "docker")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    clone = tmp_path / "clone"
    (clone / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", clone / ".ci")
    programs = {
        clone / "bin" / "make": MAKE,
        clone / "bin" / "chromium-headless-shell": MAKE,
        clone / "bin" / "kubectl": KUBECTL,
        **{clone / "bin" / f"python3.{minor}": "#!/bin/sh\nexit 1\n" for minor in (10, 12, 13)},
        clone / ".venv" / "bin" / "python": PATH_OF_A_CALL,
        clone / "tests" / "kubernetes" / "images": IMAGES,
        **{tmp_path / "shared" / name / "up": UP.format(name=name) for name in KITS},
        tmp_path / "shared" / "kubernetes" / "down": DOWN,
    }
    for path, text in programs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (clone / "tests" / "kubernetes" / "test_jobs.py").touch()
    return clone


def start(clone: Path, **variables: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MESHGATE_CLUSTER_UP", "MAKE"))}
    for name in ("KUBECONFIG", "SLURM_CONF", "DOCKER_HOST", "MESHGATE_SLURM_UP", "MESHGATE_DOCKER_UP"):
        kept.pop(name, None)
    environment = {
        "FAILS": "",
        "HANGS": "",
        "HOME": str(clone),  # with no versions of Python in ~/.pyenv
        "PATH": f"{clone / 'bin'}:/usr/bin:/bin",
        "RAN": str(clone / "ran"),
        "UP_FAILS": "",
    }
    return subprocess.Popen(
        [clone / ".ci" / "run"],
        env={**kept, **environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(clone: Path, variables: Mapping[str, str] | None = None) -> tuple[int, str, list[str]]:
    """The exit status, the output, and what ran."""
    process = start(clone, **variables or {})
    output, _ = process.communicate(timeout=60)
    return process.returncode, output, (clone / "ran").read_text().splitlines()


def test_all_parts_run_and_their_times_are_printed(clone: Path) -> None:
    status, output, ran = run(clone)
    assert status == 0, output
    assert "all checks passed" in output
    for name in ("set-up", "images", "lint", "types", "tests on Kubernetes", "end to end on Monarch nightly", "all"):
        assert f" s  {name}\n" in output
    up = [line for line in ran if line.endswith("/up")]
    assert [Path(line).parent.name for line in up] == list(KITS)
    assert "python -m benchmarks.path --quiet" in ran


def test_tests_get_the_clusters_that_were_started(clone: Path) -> None:
    _, _, ran = run(clone)
    (on_kubernetes,) = [line for line in ran if "ARGS=tests/kubernetes" in line]
    (on_others,) = [line for line in ran if "-m 'slurm or docker'" in line]
    for line in (on_kubernetes, on_others):
        assert line.endswith("(kubernetes-address the worker slurm-address docker-address)")
    assert ran.index(on_others) < ran.index(on_kubernetes)
    assert len([line for line in ran if "-m 'not (kubernetes or slurm or docker)'" in line]) == 1


def test_a_cluster_that_runs_no_pods_is_started_again_once(clone: Path) -> None:
    status, output, ran = run(clone, {"NO_PODS": "once"})
    assert status == 0, output
    assert "cluster: starting it again" in output
    shown = [line for line in ran if line.startswith(("kubectl describe nodes", "kubectl get events"))]
    restarted = [line for line in ran if "/shared/kubernetes/" in line]
    assert (len(shown), [Path(line).name for line in restarted]) == (2, ["up", "down", "up"])
    status, output, ran = run(clone, {"NO_PODS": "ever"})
    assert status != 0
    assert "failed: tests on Kubernetes" in output


def test_a_cluster_of_others_is_not_started_again(clone: Path) -> None:
    status, output, ran = run(clone, {"NO_PODS": "ever", "KUBECONFIG": "/theirs"})
    assert status != 0
    assert "failed: tests on Kubernetes" in output
    assert not any("/shared/kubernetes/" in line for line in ran)


def test_without_clusters_their_tests_are_left_out(clone: Path) -> None:
    shutil.rmtree(clone.parent / "shared")
    status, output, ran = run(clone)
    assert status == 0, output
    assert "skipping the Slurm tests" in output
    assert not any("ARGS=tests/kubernetes" in line or "-m 'slurm or docker'" in line for line in ran)


def test_output_of_parts_that_run_beside_others_is_kept_apart(clone: Path) -> None:
    _, output, _ = run(clone)
    _, _, rest = output.partition("--- set-up of Ray\n")
    printed, _, _ = rest.partition("\n--- end of set-up of Ray\n")
    assert printed == "make prints VENV=.venv-bench .venv-bench/.set-up-bench"


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({"FAILS": "lint"}, "lint"),
        ({"FAILS": ".venv-bench"}, "set-up of Ray"),
        ({"FAILS": "ARGS=tests/kubernetes"}, "tests on Kubernetes"),
        ({"UP_FAILS": "slurm"}, "Slurm"),
        ({"UP_FAILS": "slurm"}, "clusters"),
    ],
)
def test_a_part_that_fails_ends_the_run_with_its_name(clone: Path, variables: dict[str, str], part: str) -> None:
    status, output, _ = run(clone, variables)
    assert status in (3, 4)
    assert f"failed: {part}\n" in output
    assert "all checks passed" not in output


def test_a_part_that_failed_beside_another_ends_the_run_after_that(clone: Path) -> None:
    status, output, ran = run(clone, {"UP_FAILS": "kubernetes", "AWAITS_CLUSTERS": "types"})
    assert status == 4
    assert "failed: clusters\n" in output
    assert not any("MONARCH=nightly ARGS=tests/end_to_end" in line for line in ran)


def test_a_part_that_fails_ends_those_that_run_beside_it(clone: Path) -> None:
    process = start(clone, HANGS=".venv-bench", FAILS="types")
    output, _ = process.communicate(timeout=60)
    assert "failed: types" in output
    assert "set-up of Ray: ended before it was done" in output
    hanging = identify_process(int((clone / "ran.hangs").read_text()))
    assert hanging is None or hanging.wait_ended(10)
