"""What ``meshgate runs`` prints, and what ``meshgate submit`` takes. With a real job: ``tests/end_to_end``."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from meshgate.cli import runs
from meshgate.cli.app import app
from meshgate.errors import JobNotRunning
from meshgate.jobs.runs import Run
from meshgate_wire.status import RunStatus
from tests.client.cli.looks import LIKE_MARKUP


def status(name: str, state: str, **facts: Any) -> RunStatus:
    given = {"name": name, "state": state, "command": ("python", "train.py"), "age": 7300.0, **facts}
    return RunStatus.model_validate(given)


class Job:
    """A job with these runs."""

    def __init__(self, *statuses: RunStatus) -> None:
        self.statuses = statuses
        self.submitted: dict[str, Any] = {}

    def runs(self) -> list[Run]:
        return [self._run(each) for each in self.statuses]

    def submit(self, command: list[str], name: str | None, **options: Any) -> Run:
        self.submitted = {"command": command, "name": name, **options}
        return self._run(self.statuses[0])

    def _run(self, each: RunStatus) -> Run:
        run = Run(each.name, "the route")  # type: ignore[arg-type]
        run.status = lambda: each  # type: ignore[method-assign]
        run._note(each)
        return run


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    job = Job(
        status("night", "running", seconds=7200.0, restarts=1, max_restarts=3),
        status("old", "failed", exit_code=3, reason="exited with code 3", news=True),
        status("hungry", "failed", exit_code=-9, reason="it used 9.0 GB of memory, and its limit is 8.0 GB"),
    )
    monkeypatch.setattr(runs, "find_job", lambda name, namespace: job)
    return job


def test_runs_are_a_table(run: CliRunner, job: Job) -> None:
    lines = [line.split() for line in run.invoke(app, ["runs", "abc"]).output.splitlines()]
    assert lines[0] == ["NAME", "STATE", "EXIT", "AGE", "RAN", "RESTARTS", "COMMAND", "WHY"]
    assert lines[1] == ["night", "running", "2h1m", "2h", "1", "of", "3", "python", "train.py"]
    assert lines[2] == ["old", "*", "failed", "3", "2h1m", "0s", "python", "train.py"]
    assert lines[3][:5] == ["hungry", "failed", "-9", "2h1m", "0s"]
    assert " ".join(lines[3]).endswith("python train.py it used 9.0 GB of memory, and its limit is 8.0 GB")


@pytest.mark.parametrize("odd", LIKE_MARKUP)
def test_text_in_brackets_is_shown_as_it_is(run: CliRunner, job: Job, odd: str) -> None:
    command = ("python", "train.py", f"paths={odd}")
    job.statuses = (status("night", "failed", command=command, exit_code=1, reason=f"no file {odd}"),)
    assert f"python train.py paths={odd}  no file {odd}" in run.invoke(app, ["runs", "abc"]).output


def test_a_job_without_runs_says_so(run: CliRunner, job: Job) -> None:
    job.statuses = ()
    assert run.invoke(app, ["runs", "abc"]).output == "no runs\n"
    assert run.invoke(app, ["runs", "abc", "--json"]).output == '{\n  "runs": []\n}\n'


def test_a_submission_takes_the_options_of_the_program_as_they_are(run: CliRunner, job: Job) -> None:
    options = ["--name", "night", "-e", "A=b", "--restarts", "2", "--memory", "8Gi", "--disk", "1.5G"]
    done = run.invoke(app, ["submit", "abc", *options, "--", "python", "train.py", "--name", "x", "-f"])
    assert done.exit_code == 0, done.output
    assert job.submitted == {
        "command": ["python", "train.py", "--name", "x", "-f"],
        "name": "night",
        "env": {"A": "b"},
        "restarts": 2,
        "memory": 8 * 2**30,
        "processes": None,
        "disk": 1_500_000_000,
        "sync_dirs": None,
    }
    assert done.output == (
        "submitted night; `meshgate logs abc --run night -f` shows what it prints. Once the run has ended, that stays "
        "until the job ends, after its idle timeout\n"
    )


@pytest.mark.parametrize("size", ["8GiB", "much", "8Xi", "", "inf", "nan", "1e400"])
def test_an_invalid_size_is_refused(size: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size such as 8Gi or 500M"):
        runs._bytes(size, "--memory")


@pytest.mark.parametrize(("code", "status"), [(0, 0), (3, 3), (-15, 143), (None, 1)])
def test_a_followed_run_gives_the_exit_code_of_a_shell(code: int | None, status: int) -> None:
    assert runs.exit_status(code) == status


def test_a_submission_without_a_job_says_that_the_job_comes_first(
    run: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str, namespace: str | None) -> None:
        raise JobNotRunning(f"no job id begins with {name!r}")

    monkeypatch.setattr(runs, "find_job", find)
    result = run.invoke(app, ["submit", "--", "sh", "-c", "exit 3"])
    assert result.exit_code == 3
    hint = "the job comes before the command: meshgate submit JOB -- sh -c 'exit 3'"
    assert result.output == f"meshgate: no job id begins with 'sh'; {hint}\n"
    assert "before" not in run.invoke(app, ["submit", "cafe", "--", "sh"]).output
