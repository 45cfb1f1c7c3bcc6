"""Runs as their gateway answers, and what a submission consists of. How they run is tested end to end."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from meshgate import progress
from meshgate.code_sync import session_sync
from meshgate.code_sync.project import Tree
from meshgate.errors import ConnectionFailedError, InvalidRequestError
from meshgate.jobs import runs
from meshgate.jobs.runs import Run
from meshgate.progress import Block
from meshgate_wire.status import RunStatus
from tests.client.jobs.fake_job import FakeJob

VERSION = "ab" * 32


def status(state: str = "running", **facts: Any) -> dict[str, Any]:
    return {"name": "night", "state": state, "command": ["python"], "age": 1.0, **facts}


def page(start: int, data: bytes, state: str = "running", **facts: Any) -> dict[str, Any]:
    return {"start": start, "data": base64.b64encode(data).decode(), "run": status(state, **facts)}


class Gateway:
    """Answers requests from a list, and keeps what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.bodies: list[Any] = []

    def __call__(self, dialer: object, path: str, body: bytes | None = None, *, refusals: object) -> Any:
        self.asked.append(path)
        self.bodies.append(None if body is None else json.loads(body))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gateway]:
    def answer(*answers: Any) -> Gateway:
        found = Gateway(*answers)
        monkeypatch.setattr(runs, "request_json", found)
        return found

    monkeypatch.setattr(runs, "RETRY", 0.0)
    return answer


def night() -> Run:
    return Run("night", "the route")  # type: ignore[arg-type]


def test_the_exit_code_is_there_once_the_run_has_ended(gateway: Any) -> None:
    gateway(status(), status("failed", exit_code=3))
    run = night()
    assert run.exit_code is None
    assert run.exit_code == 3
    assert run.exit_code == 3  # without asking again
    assert repr(run) == "Run('night', failed)"


def test_waiting_goes_on_while_the_gateway_cannot_be_reached(gateway: Any) -> None:
    asked = gateway(status(), ConnectionFailedError("asleep"), status("stopped", exit_code=-15))
    assert night().wait() == -15
    assert asked.asked == ["/v1/runs/night?wait=10.0"] * 3


def test_an_outage_ends_a_wait_after_a_while(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "OUTAGE", -1.0)
    gateway(ConnectionFailedError("gone"))
    with pytest.raises(ConnectionFailedError, match="gone"):
        night().wait()


def test_a_wait_has_a_timeout(gateway: Any) -> None:
    gateway(status())
    with pytest.raises(TimeoutError, match="the run night has not ended within 0 s: it is running"):
        night().wait(timeout=0)


def test_logs_are_lines_with_their_ends(gateway: Any) -> None:
    asked = gateway(
        page(0, b"one\n50%\r"),
        page(8, b"100%\r\nt\xc3"),
        page(16, b"\xa9"),
        page(17, b"end"),
        page(20, b"", "succeeded"),
    )
    assert list(night().logs(follow=True)) == ["one\n", "50%\r", "100%\r\n", "t\u00e9end"]
    assert asked.asked[2] == "/v1/runs/night/output?after=16&wait=10.0"


def test_a_line_of_many_pages_is_read_in_time_in_proportion_to_its_length(gateway: Any) -> None:
    part = 2**20
    gateway(
        page(0, b"x" * part), page(part, b"x" * part + b"\r"), page(2 * part + 1, b"\nend"), page(2 * part + 5, b"")
    )
    assert list(night().logs()) == ["x" * 2 * part + "\r\n", "end"]  # in the square of it, this takes an hour


def test_logs_that_are_not_followed_end_with_what_is_there(gateway: Any) -> None:
    asked = gateway(page(0, b"one\n"), page(4, b""))
    assert list(night().logs()) == ["one\n"]
    assert asked.asked[0] == "/v1/runs/night/output?after=0&wait=0"


def test_output_that_is_no_longer_kept_is_noted(gateway: Any) -> None:
    gateway(page(100, b"late\n"), page(105, b""))
    assert "".join(night().logs()) == "\n[meshgate: 100 bytes of older output are no longer kept]\nlate\n"


def test_a_request_to_stop_has_the_grace(gateway: Any) -> None:
    asked = gateway(status("stopping"))
    night().stop(grace=2.5)
    assert (asked.asked, asked.bodies) == (["/v1/runs/night/stop"], [{"grace": 2.5, "id": ""}])


FIRST, SECOND = "1" * 32, "2" * 32  # the ids of two runs with the same name
REUSED = (
    r"the run night has ended; another run has this name now: job\.run\('night'\) returns that one, and "
    r"`meshgate logs --run night` shows what it prints"
)


def known(gateway: Any, *answers: Any, **facts: Any) -> tuple[Run, Gateway]:
    """The first run of its name, which has seen its id, and the gateway that gives it the other answers."""
    asked = gateway(status(id=FIRST, **facts), *answers)
    run = night()
    run.status()
    return run, asked


@pytest.mark.parametrize("ask", [Run.status, Run.wait, lambda run: run.exit_code])
def test_a_run_does_not_become_a_later_one_with_its_name(gateway: Any, ask: Callable[[Run], object]) -> None:
    run, _ = known(gateway, status("succeeded", exit_code=0, id=SECOND))
    with pytest.raises(InvalidRequestError, match=REUSED):
        ask(run)


def test_output_of_a_later_run_is_not_that_of_an_earlier_one(gateway: Any) -> None:
    run, _ = known(gateway, page(0, b"one\n", id=FIRST), page(4, b"lost\n", id=SECOND), page(4, b"lost\n", id=SECOND))
    lines = run.logs(follow=True)
    assert next(lines) == "one\n"
    with pytest.raises(InvalidRequestError, match=REUSED):
        next(lines)
    with pytest.raises(InvalidRequestError, match=REUSED):
        run.output(4)


def test_a_run_that_was_seen_to_end_keeps_its_end(gateway: Any) -> None:
    later = status(id=SECOND)
    ended = page(0, b"", "failed", exit_code=7, id=FIRST)
    run, _ = known(gateway, ended, later, later, page(0, b"of the later one", id=SECOND))
    assert list(run.logs(follow=True)) == []
    assert run.wait() == 7
    assert run.status().state == "failed"
    with pytest.raises(InvalidRequestError, match=REUSED):
        list(run.logs())


def test_a_request_to_stop_has_the_id_of_the_run(gateway: Any) -> None:
    run, asked = known(gateway, status("stopping", id=FIRST))
    run.stop()
    assert asked.bodies[-1] == {"grace": 30.0, "id": FIRST}


def test_a_run_whose_id_is_not_known_any_more_is_taken_for_the_same(gateway: Any) -> None:
    run, _ = known(gateway, status("lost"), status("succeeded", id=SECOND))  # its files are damaged
    assert run.status().state == "lost"
    assert run.status().state == "lost"


# --- submissions ------------------------------------------------------------------------------------------


class Report(NamedTuple):
    version: str


class Submitting(FakeJob):
    """A job whose code is the directory ``top``."""

    def _dialer(self) -> str:  # type: ignore[override]
        return "the route"

    def sync(self, **options: Any) -> Any:
        return Report(VERSION)


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project; its directory ``recipes`` is the working directory."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/train.py").touch()
    monkeypatch.chdir(tmp_path / "recipes")
    tree = Tree(tmp_path, (), ("src", ""))
    monkeypatch.setattr(session_sync, "sync_for", lambda client, sync_dirs: type("Sync", (), {"tree": tree}))
    return tmp_path


def submitted(gateway: Any, *command: str, **options: Any) -> Any:
    """The body of the submission of ``command``."""
    asked = gateway(status("starting"))
    job = Submitting(1)
    run = job.submit(command, **options)
    job.kill()
    assert isinstance(run, Run)
    return asked.bodies[0]


def test_a_submission_has_command_version_and_directory(gateway: Any, top: Path) -> None:
    body = submitted(gateway, "python", "train.py", "--lr", "1e-3", name="night", env={"A": "b"}, restarts=2)
    assert len(body.pop("id")) == 32
    assert body == {
        "name": "night",
        "command": ["python", "train.py", "--lr", "1e-3"],
        "version": VERSION,
        "directory": "recipes",
        "paths": ["src", ""],
        "environment": {"A": "b"},
        "restarts": 2,
        "job": {"kind": "FakeJob"},  # which Submitting extends
    }


def test_a_submission_that_takes_long_says_what_it_does(
    gateway: Any, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Callable[[], str]] = []
    texts: list[str] = []
    monkeypatch.setattr(progress, "Waiting", lambda text: shown.append(text) or Block())
    monkeypatch.setattr(Submitting, "sync", lambda job, **options: texts.append(shown[0]()) or Report(VERSION))
    submitted(gateway, "python", "train.py")
    assert texts == ["submitting python train.py: the job gets its code"]
    assert shown[0]() == "submitting python train.py: the gateway starts it"


def test_a_submission_is_repeated_after_a_cut_with_its_id(gateway: Any, top: Path) -> None:
    asked = gateway(ConnectionFailedError("cut"), ConnectionFailedError("cut"), status("running"))
    job = Submitting(1)
    run = job.submit(["python", "train.py"])
    job.kill()
    assert asked.asked == ["/v1/runs"] * 3
    assert asked.bodies[0] == asked.bodies[1] == asked.bodies[2]
    assert run.name == asked.bodies[0]["name"]


def test_an_outage_leaves_it_open_whether_a_run_was_started(
    gateway: Any, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "OUTAGE", -1.0)
    gateway(ConnectionFailedError("gone"))
    job = Submitting(1)
    with pytest.raises(ConnectionFailedError, match=r"it is not known whether the run night was started: gone\. Look"):
        job.submit(["python", "train.py"], name="night")
    job.kill()


@pytest.mark.parametrize("grace", [-1, float("nan"), 86_401, "30"])
def test_a_grace_that_no_gateway_accepts_is_refused(gateway: Any, grace: Any) -> None:
    with pytest.raises(ValueError, match=r"stop\(grace=.*\): expected a number of seconds, 0 to 86400"):
        night().stop(grace=grace)


def test_words_of_a_command_need_not_be_strings(gateway: Any, top: Path) -> None:
    body = submitted(gateway, Path("recipes"), 3)  # type: ignore[arg-type]
    assert body["command"] == ["recipes", "3"]


def test_what_names_this_machine_is_translated(gateway: Any, top: Path) -> None:
    (top / "data.csv").touch()
    body = submitted(gateway, sys.executable, str(top / "recipes/train.py"), str(top / "data.csv"), "/etc/hostname")
    assert body["command"] == ["python", "train.py", "../data.csv", "/etc/hostname"]
    assert body["name"].startswith("train-")


def test_an_argument_that_cannot_be_a_path_is_passed_on(gateway: Any, top: Path) -> None:
    too_long = f"/{'9j4AAQ' * 50}"  # for the name of a file, as text in base64 may be
    assert submitted(gateway, "python", "train.py", too_long)["command"] == ["python", "train.py", too_long]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python3.11", "-u", "my train.py"], "my-train-"),
        (["python", "-m", "torch.distributed.run"], "torch-"),
        (["bash", "-c", "x"], "bash-"),
        (["python"], "python-"),
    ],
)
def test_a_run_without_a_name_is_called_after_its_program(command: list[str], name: str) -> None:
    assert runs._name_of(command).startswith(name)
    assert runs._name_of(command) != runs._name_of(command)


@pytest.mark.parametrize(
    ("command", "options", "text"),
    [
        (["python", f"{'x' * 300}.py"], {}, r"the script x+\.py does not exist in .*recipes"),
        (["python", "nothing.py"], {}, r"the script nothing.py does not exist in .*recipes"),
        (["python", "train.py"], {"name": "a/b"}, r"submit\(name='a/b'\): the name of a run begins with a letter"),
        (["python", "train.py"], {"restarts": -1}, r"submit\(restarts=-1\)"),
        (["python", "a\0b"], {}, r"submit\(command\.1='a\\x00b'\): an argument of a program has no null byte"),
        (["python", "train.py"], {"env": {"A=B": "c"}}, r"submit\(env\.A=B='A=B'\): the name of a variable has no '='"),
        (
            ["python", "train.py"],
            {"env": {"A": "\0"}},
            r"submit\(env\.A='\\x00'\): .* neither name nor value has a null byte",
        ),
        (["python", "train.py"], {"env": ["A"]}, r"submit\(env=\['A'\]\): Input should be a valid dictionary"),
        (["python", "x" * 20_000], {}, r"submit\(command\.1='x{99}\): String should have at most 16384 characters"),
    ],
)
def test_what_cannot_run_there_is_refused_before_the_job_is_applied(
    top: Path, command: Any, options: Any, text: str
) -> None:
    job = Submitting(1)
    with pytest.raises(ValueError, match=text):
        job.submit(command, **options)
    assert not job.active


def test_a_command_that_is_too_long_once_it_is_translated_is_refused(gateway: Any, top: Path) -> None:
    within = [str(top / "recipes")] * (60_000 // len(str(top / "recipes")))  # "." each, there
    assert submitted(gateway, "python", "train.py", *within)["command"][2:] == ["."] * len(within)
    with pytest.raises(ValueError, match=r"env= have 64\d\d\d bytes as JSON, and the limit is 49152: put long"):
        submitted(gateway, "python", *["x" * 16_000] * 4)


def test_a_script_outside_of_the_project_is_refused(gateway: Any, top: Path, tmp_path_factory: Any) -> None:
    script = tmp_path_factory.mktemp("elsewhere") / "train.py"
    script.touch()
    with pytest.raises(ValueError, match="is outside of the synced project"):
        submitted(gateway, "python", str(script))


def test_a_working_directory_outside_of_the_project_is_refused(
    gateway: Any, top: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(ValueError, match=r"the working directory .* is outside of the synced project"):
        submitted(gateway, "python")


def test_what_lies_beside_the_synced_directories_is_not_in_the_project(
    top: Path, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("library", "beside/data"):
        (top / name).mkdir(parents=True)
    (top / "beside/train.py").touch()
    tree = Tree(top, ("recipes", "library"))
    monkeypatch.setattr(session_sync, "sync_for", lambda client, sync_dirs: type("Sync", (), {"tree": tree}))
    data, library = str(top / "beside/data"), str(top / "library")
    assert submitted(gateway, "python", "train.py", data, library)["command"][2:] == [data, "../library"]
    with pytest.raises(ValueError, match=f"is outside of the synced project {top}/recipes, {top}/library: move it"):
        submitted(gateway, "python", str(top / "beside/train.py"))
    monkeypatch.chdir(top)
    assert submitted(gateway, "python", "recipes/train.py").get("directory", "") == ""
    monkeypatch.chdir(top / "beside")
    with pytest.raises(ValueError, match=r"the working directory .*beside is outside of the synced project"):
        submitted(gateway, "python")


def test_the_runs_of_a_job_are_listed(gateway: Any) -> None:
    asked = gateway({"runs": [status("succeeded", exit_code=0), status()]}, status())
    job = Submitting(1)
    job.apply()
    found = job.runs()
    assert [(run.name, run._last.state) for run in found if run._last is not None] == [
        ("night", "succeeded"),
        ("night", "running"),
    ]
    assert found[0].exit_code == 0
    assert job.run("night").name == "night"
    assert asked.asked == ["/v1/runs", "/v1/runs/night"]
    job.kill()


def test_a_status_knows_whether_the_run_is_live() -> None:
    states = ("starting", "running", "restarting", "stopping", "succeeded", "failed", "stopped", "lost")
    live = [RunStatus.model_validate(status(state)).live for state in states]
    assert live == [True] * 4 + [False] * 4
