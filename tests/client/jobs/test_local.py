from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from meshgate import Actor, endpoint
from meshgate.jobs.local import LocalJob
from meshgate.jobs.trait import job_loads


class Hello(Actor):
    @endpoint
    def hello(self) -> int:
        return os.getpid()


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_each_name_is_one_host_unless_a_number_is_given() -> None:
    with LocalJob(("trainers", "readers")) as job:
        state = job.state()
        assert (dict(state.trainers.sizes), dict(state.readers.sizes)) == ({"hosts": 1}, {"hosts": 1})
    assert repr(LocalJob()) == "LocalJob({'hosts': 1})"
    assert repr(LocalJob(meshes={"workers": 2})) == repr(LocalJob({"workers": 2})) == "LocalJob({'workers': 2})"


def test_actors_run_on_every_host() -> None:
    with LocalJob(meshes={"workers": 2}) as job:
        pids = list(job.state().workers.spawn("hello", Hello).hello.call().get().values())
        assert len(set(pids)) == 2


def test_no_other_process_finds_the_job() -> None:
    with LocalJob() as job:
        job.state()
        assert os.listdir() == []
        assert not job.can_run(job)
        copy = job_loads(job.dumps())
        assert not copy.active
        assert repr(copy) == "LocalJob({'hosts': 1})"


def test_a_string_instead_of_names_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"write LocalJob\(\['workers'\]\)"):
        LocalJob("workers")
    with pytest.raises(TypeError, match=r"^LocalJob: 2: expected the names of hosts, or numbers of hosts by name$"):
        LocalJob(2)  # type: ignore[arg-type]


def test_a_batch_script_runs_with_its_output_in_a_file() -> None:
    Path("train.py").write_text("import os; print('batch', os.environ['MONARCH_BATCH_JOB'])")
    job = LocalJob()
    with pytest.raises(ValueError, match="no local batch job"):
        job.process  # noqa: B018
    job.apply(client_script="train.py")
    assert job.active
    assert job.process.args == [sys.executable, "train.py"]
    assert job.process.wait() == 0
    (log,) = Path(".monarch/logs").glob("job_*/stdout.log")
    assert log.read_text() == "batch 1\n"
    job.kill()
    assert not job.active


def test_kill_ends_a_batch_script() -> None:
    Path("train.py").write_text("import sys, signal; signal.pause()")
    job = LocalJob()
    job.apply(client_script="train.py")
    process = job.process
    job.kill()
    assert process.returncode is not None
