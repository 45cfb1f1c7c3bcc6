"""Complete programs in the cluster: meshgate's examples, and Kubetorch's with changed imports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshgate import Compute, KubernetesJob
from meshgate_kubernetes.manifests.names import JOB_LABEL
from tests.documents import programs_in, python_blocks
from tests.kubernetes.cluster import KINDS, Kubectl, bare_worker_pods
from tests.programs import ROOT

# Kubetorch's examples, unchanged except for their imports.
BASIC = """
import meshgate as kt
from meshgate import KubernetesJob
from meshgate import Actor, endpoint

# Define your actor
class Trainer(Actor):
    @endpoint
    def train_step(self, batch_size: int) -> str:
        import torch
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        return f"Training step on {device} with batch_size={batch_size}"

    @endpoint
    def get_rank(self) -> dict:
        return {"rank": self.rank}

# Create job with compute specification
job = KubernetesJob(
    compute=kt.Compute(
        gpu=1,
        replicas=2,
        image=kt.Image(name="monarch-worker").pip_install(["torchmonarch"]),
    )
)

# Get job state with host mesh
state = job.state()
host_mesh = state.workers

# Spawn processes (one per GPU)
proc_mesh = host_mesh.spawn_procs(per_host={"gpus": 1})

# Spawn actors on processes
trainers = proc_mesh.spawn("trainers", Trainer)

# Call actor methods
results = trainers.train_step.call(batch_size=32).get()
print(results)  # Results from all actors

# Get individual ranks
ranks = trainers.get_rank.call().get()
print(ranks)

# Clean up
job.kill()
"""

PREALLOCATED = """
from meshgate import KubernetesJob

job = KubernetesJob(
    selector={"app": "my-monarch-workers"},
    namespace="my-namespace",
)
state = job.state()
# ... use state.workers as normal
"""

# The image has no torch: the part that the program needs is synced with its code.
TORCH = """
import contextlib

class cuda:
    is_available = staticmethod(lambda: False)

class storage:  # what Monarch uses if torch is installed
    class UntypedStorage: ...
    class TypedStorage: ...

class utils:
    class _python_dispatch:
        _disable_current_modes = contextlib.nullcontext
"""

MODEL = """
from meshgate import Actor, endpoint
from step_of_cluster import STEP

class Model(Actor):
    @endpoint
    def step(self):
        return STEP
"""

DRIVER = """
import pathlib, sys
from meshgate import Compute, KubernetesJob
from model_of_cluster import Model

with KubernetesJob(compute=Compute(replicas=8), name="live", namespace=sys.argv[1]) as job:
    hosts = job.state().workers
    procs = hosts.spawn_procs()
    print(set(procs.spawn("first", Model).step.call().get().values()))
    pathlib.Path("step_of_cluster.py").write_text("STEP = 22\\n")
    print(job.sync(quiet=True).ready, "hosts")
    print(set(hosts.spawn_procs().spawn("second", Model).step.call().get().values()))
    print(sorted(procs.reload().get().item(hosts=7)["modules"]))
    print(set(procs.spawn("third", Model).step.call().get().values()))
"""


def run(
    program: list[str],
    cwd: Path,
    *,
    python: str = sys.executable,
    returncode: int = 0,
    timeout: float = 110,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [python, *program],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == returncode, done.stderr
    return done


def assert_nothing_left(progress: str) -> None:
    """Asserts that no object of the job remains whose progress output this is."""
    (name,) = set(re.findall(r"^default/(\S+): is ready ", progress, re.MULTILINE))
    assert Kubectl("default")("get", KINDS, "-l", f"{JOB_LABEL}={name}", "-o", "name") == ""


def readme_program() -> str:
    """The README's program, with the imports and the job that it names for a cluster."""
    (program,) = programs_in("README.md")
    (job,) = (block.code for block in python_blocks(ROOT / "README.md") if block.code.startswith("with KubernetesJob"))
    for old, new in (("ProcessJob,", "Compute, KubernetesJob,"), ('with ProcessJob({"workers": 2}) as job:\n', job)):
        assert old in program
        program = program.replace(old, new)
    return program


LAPTOPS = [sys.executable, *os.environ.get("MESHGATE_TEST_LAPTOPS", "").split()]


@pytest.fixture(params=LAPTOPS)
def laptop(request: pytest.FixtureRequest) -> str:
    """The Python of a laptop: that of the workers, and others with meshgate installed."""
    return str(request.param)


def test_the_example_runs_unchanged(tmp_path: Path, images: tuple[str, str], laptop: str) -> None:
    done = run([str(ROOT / "examples" / "kubernetes.py")], tmp_path, python=laptop)
    assert "'rank 1 is done'" in done.stdout
    assert_nothing_left(done.stderr)


def test_training_waits_for_the_pod_that_replaces_a_deleted_one(
    namespace: str, kubectl: Kubectl, images: tuple[str, str], tmp_path: Path
) -> None:
    example = [str(ROOT / "examples" / "lost_hosts.py"), "--kubernetes", images[1], "--namespace", namespace]
    command = [sys.executable, "-u", *example, "--steps", "1000000", "--every", "1"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        lines = iter(training.stdout)
        assert any(line.startswith("step 5: ") for line in lines)
        kubectl("delete", "pod", "lost-hosts-workers-1", "--wait=false", "--grace-period=10")
        going_on = next(line for line in lines if line.startswith("going on from step "))
        saved = re.fullmatch(r"going on from step (\d+): lost-hosts-workers-1: its pod is being deleted.*\n", going_on)
        assert saved is not None, going_on
        assert next(lines).startswith(f"step {int(saved[1]) + 1}: ")
        training.terminate()  # ends the block that the job is in
        training.stdout.read()
    assert training.returncode == 128 + signal.SIGTERM


def test_samples_stay_in_their_pods(namespace: str, images: tuple[str, str], tmp_path: Path) -> None:
    example = [str(ROOT / "examples" / "kept_samples.py"), "--kubernetes", images[1], "--namespace", namespace]
    done = run(example, tmp_path, timeout=300)
    assert re.search(r"^step 20: weight [23]\.\d\d, \d\d+ kB of samples stayed$", done.stdout, re.MULTILINE)


def test_the_program_in_the_document_runs_as_pasted(tmp_path: Path, images: tuple[str, str], laptop: str) -> None:
    (program,) = programs_in("docs/kubernetes.md")
    (tmp_path / "program.py").write_text(program)
    done = run(["program.py"], tmp_path, python=laptop)
    assert "'rank 1 is done'" in done.stdout
    assert "a step of 32 samples" in done.stdout
    assert_nothing_left(done.stderr)


def test_the_readmes_program_runs_with_the_readmes_job(
    tmp_path: Path, images: tuple[str, str], four_gpus: None, laptop: str
) -> None:
    (tmp_path / "program.py").write_text(readme_program())
    done = run(["program.py"], tmp_path, python=laptop)
    assert "'rank 3 is done'" in done.stdout
    assert_nothing_left(done.stderr)


def test_kubetorchs_basic_example_runs_unchanged(
    tmp_path: Path, images: tuple[str, str], four_gpus: None, laptop: str
) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "basic.py").write_text(BASIC)
    (tmp_path / "torch.py").write_text(TORCH)
    done = run(["basic.py"], tmp_path, python=laptop)
    assert done.stdout.count("Training step on cpu with batch_size=32") == 2
    assert "{'rank': 0}" in done.stdout
    assert "{'rank': 1}" in done.stdout
    assert_nothing_left(done.stderr)


def test_a_program_that_fails_for_want_of_a_module_names_the_image_and_leaves_nothing(
    tmp_path: Path, images: tuple[str, str]
) -> None:
    failing = (
        readme_program()
        .replace("gpus=2)", "cpus=0.1)")
        .replace("        print(", "        import torch\n        print(", 1)
    )
    (tmp_path / "program.py").write_text(failing)
    done = run(["program.py"], tmp_path, returncode=1)
    assert "No module named 'torch'" in done.stderr
    assert "Image().pip_install(['torch'])" in done.stderr
    assert_nothing_left(done.stderr)


def test_kubetorchs_example_of_preallocated_pods_runs(
    namespace: str, kubectl: Kubectl, images: tuple[str, str], tmp_path: Path
) -> None:
    use = "state.workers.spawn_procs().initialized.get(); print(len(state.workers)); job.kill()\n"
    (tmp_path / "preallocated.py").write_text(PREALLOCATED.replace("my-namespace", namespace) + use)
    with bare_worker_pods(kubectl, images[1], "my-monarch-workers", 2):
        kubectl("rollout", "status", "statefulset/my-monarch-workers", "--timeout=180s", timeout=190)
        assert run(["preallocated.py"], tmp_path).stdout == "2\n"
        assert kubectl("get", "pods", "-l", "app=my-monarch-workers", "-o", "name").count("pod/") == 2


def test_new_processes_on_eight_pods_run_the_saved_code(namespace: str, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "step_of_cluster.py").write_text("STEP = 1\n")
    (tmp_path / "model_of_cluster.py").write_text(MODEL)
    (tmp_path / "driver.py").write_text(DRIVER)
    printed = run(["driver.py", namespace], tmp_path, timeout=300).stdout
    assert printed.splitlines() == [
        "{1}", "8 hosts", "{22}", "['model_of_cluster', 'step_of_cluster']", "{22}",
    ]  # fmt: skip


def test_a_second_program_finds_the_job_by_name(namespace: str, kubectl: Kubectl) -> None:
    with KubernetesJob(compute=Compute(), name="shared", namespace=namespace) as job:
        job.apply()
        other = KubernetesJob(name="shared", namespace=namespace)
        assert other.state(cached_path=None).workers.sizes == {"hosts": 1}
        other._client.close()
