"""The life of a job: found from anywhere, deleted completely, and ended when idle."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from meshgate import Compute, KubernetesJob
from meshgate.errors import CallCancelledError, JobNotRunning, JobStartFailed
from tests.kubernetes.actors import Trainer, Waiter
from tests.kubernetes.cluster import Kubectl
from tests.programs import child_process
from tests.waiting import wait_for


def first_pod(job: KubernetesJob) -> str:
    trainers = job.state().workers.spawn_procs().spawn("trainers", Trainer)
    return str(trainers.slice(hosts=0).pod.call_one().get(timeout=60))


def run(program: str, directory: Path) -> str:
    """The output of another process with the same environment."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_job_is_found_by_its_file_and_by_its_name(namespace: str, tmp_path: Path) -> None:
    start = f"""
        from meshgate import Compute, KubernetesJob
        job = KubernetesJob(compute=Compute(), name="found", namespace={namespace!r})
        job.state()
        print(job.apply_id)
        """
    first, second = run(start, tmp_path), run(start, tmp_path)
    assert first == second
    elsewhere = KubernetesJob(name="found", namespace=namespace)
    try:
        assert elsewhere.state(cached_path=None).workers.sizes == {"hosts": 1}
        assert first_pod(elsewhere) == "found-workers-0"
    finally:
        elsewhere.kill()
    elsewhere.kill()
    with pytest.raises(JobNotRunning, match="there is no job 'found'"):
        KubernetesJob(name="found", namespace=namespace).apply()


def test_two_jobs_run_side_by_side(namespace: str) -> None:
    one = KubernetesJob(compute=Compute(), name="left", namespace=namespace)
    two = KubernetesJob(compute=Compute(), name="right", namespace=namespace)
    with one, two:
        assert first_pod(one) == "left-workers-0"
        assert first_pod(two) == "right-workers-0"
        one.kill()
        assert first_pod(two) == "right-workers-0"


def test_a_call_in_pods_is_cancelled_and_output_is_kept_in_files(
    namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHGATE_LOG_DIR", str(tmp_path / "printed"))
    with KubernetesJob(compute=Compute(replicas=2), name="cancelled", namespace=namespace) as job:
        waiters = job.state().workers.spawn_procs().spawn("waiters", Waiter)
        waits = waiters.wait_until_cancelled.call("it")
        files = [tmp_path / "printed" / "waiters" / f"{rank}.log" for rank in range(2)]
        wait_for(lambda: all(each.exists() and "it begins\n" in each.read_text() for each in files), "what they print")
        assert waits.cancel()
        assert isinstance(waits.exception(60), CallCancelledError)
        wait_for(lambda: [each.read_text() for each in files] == ["it begins\nit ends\n"] * 2, "its end")


def test_an_idle_job_deletes_itself(
    namespace: str, kubectl: Kubectl, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    KubernetesJob(compute=Compute(inactivity_ttl="4s"), name="alone", namespace=namespace).apply()
    assert "ends after 4 s without a session" in capfd.readouterr().err
    use = f"""
        from meshgate import KubernetesJob
        job = KubernetesJob(name="alone", namespace={namespace!r})
        job.state(cached_path=None).workers.spawn_procs().initialized.get(timeout=60)
        """
    run(use, tmp_path)  # until its first session, a new job has longer than 4 s
    kubectl.wait_deleted("configmap/alone")


def test_a_different_job_of_the_same_name_is_a_conflict(namespace: str) -> None:
    with KubernetesJob(compute=Compute(), name="taken", namespace=namespace) as job:
        job.apply()
        different = "a job 'taken' with a different specification is already running"
        with pytest.raises(JobStartFailed, match=different):
            KubernetesJob(compute=Compute(replicas=2), name="taken", namespace=namespace).apply()
        with KubernetesJob(compute=Compute(), name="taken", namespace=namespace) as same:
            same.apply()
            assert first_pod(same) == "taken-workers-0"


def test_objects_of_others_are_not_replaced(namespace: str, kubectl: Kubectl) -> None:
    kubectl("create", "service", "clusterip", "mine-gateway", "--tcp=80:80")
    try:
        with pytest.raises(JobStartFailed, match=r"Service 'mine-gateway' .* does not belong to job 'mine'"):
            KubernetesJob(compute=Compute(), name="mine", namespace=namespace).apply()
        assert kubectl("get", "service", "mine-gateway", "-o", "jsonpath={.spec.ports[0].port}") == "80"
    finally:
        kubectl("delete", "service", "mine-gateway")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_while_a_job_starts_leaves_nothing(namespace: str, kubectl: Kubectl, number: signal.Signals) -> None:
    program = f"""
        from meshgate import Compute, KubernetesJob
        pod_spec = {{"containers": [{{"name": "worker", "command": ["sleep", "600"]}}]}}
        with KubernetesJob(compute=Compute(pod_spec=pod_spec), name="stopped", namespace={namespace!r}) as job:
            job.apply()
        """
    with child_process([sys.executable, "-c", textwrap.dedent(program)], stderr=subprocess.PIPE, text=True) as driver:
        while "workers: 1 running" not in driver.stderr.readline():
            assert driver.poll() is None
        driver.send_signal(number)
        assert ("KeyboardInterrupt" in driver.stderr.read()) is (number is signal.SIGINT)
        assert driver.wait(timeout=60) != 0
    kubectl.wait_deleted("configmap/stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_in_a_with_block_ends_the_job(namespace: str, kubectl: Kubectl, number: signal.Signals) -> None:
    program = f"""
        import time
        from meshgate import Compute, KubernetesJob
        with KubernetesJob(compute=Compute(), name="signalled", namespace={namespace!r}) as job:
            procs = job.state().workers.spawn_procs()
            procs.initialized.get()
            print("up", flush=True)
            time.sleep(600)
        """
    with child_process([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout.readline() == "up\n"
        driver.send_signal(number)
        assert driver.wait(timeout=120) == (128 + number if number is signal.SIGTERM else -number)
    kubectl.wait_deleted("configmap/signalled")


def test_the_job_of_a_killed_driver_is_usable_by_the_next(namespace: str, kubectl: Kubectl) -> None:
    program = f"""
        import time
        from meshgate import Compute, KubernetesJob
        job = KubernetesJob(compute=Compute(), name="orphan", namespace={namespace!r})
        job.state(cached_path=None).workers.spawn_procs().initialized.get()
        print("up", flush=True)
        time.sleep(600)
        """
    with child_process([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout.readline() == "up\n"
    with KubernetesJob(name="orphan", namespace=namespace) as job:
        assert first_pod(job) == "orphan-workers-0"
