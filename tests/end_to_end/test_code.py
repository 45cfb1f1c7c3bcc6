"""Saved code runs in the next process on the hosts."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshgate import ActorError, InvalidRequestError, MeshgateError, ProcessJob, SupervisionError
from meshgate_sync.errors import TreeTooLarge
from tests.projects import project_in

SETTINGS = "STEP = {step}\n"
MODEL = """
from meshgate import Actor, endpoint
from settings_of_test import STEP

class Model(Actor):
    @endpoint
    def step(self):
        return STEP

    @endpoint
    def pid(self):
        import os

        return os.getpid()

    @endpoint
    def late(self):
        from late_of_test import STEP

        return STEP

    @endpoint
    def same(self, value):
        return value

    @endpoint
    def where(self):
        return __file__
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    files = {"settings_of_test.py": SETTINGS.format(step=1), "model_of_test.py": MODEL}
    with project_in(tmp_path, monkeypatch, files) as directory:
        yield directory


@pytest.fixture
def job(project: Path) -> Iterator[ProcessJob]:
    """On one host, for what does not depend on their number."""
    with ProcessJob({"workers": 1}) as job:
        job.state()
        yield job


@pytest.fixture
def job_on_two_hosts(project: Path) -> Iterator[ProcessJob]:
    with ProcessJob({"workers": 2}) as job:
        job.state()
        yield job


def model() -> Any:
    return importlib.import_module("model_of_test").Model


def steps(mesh: Any) -> list[int]:
    return list(mesh.step.call().get(timeout=60).values())


def test_processes_run_the_latest_synced_version(job_on_two_hosts: Any, project: Path) -> None:
    job = job_on_two_hosts
    hosts = job.state().workers
    report = job.sync(quiet=True)
    assert (report.files, report.ready, report.hosts) == (2, 2, 2)
    first = hosts.spawn_procs().spawn("first", model())
    assert steps(first) == [1] * 2
    assert str(project) not in first.where.choose().get()
    (project / "settings_of_test.py").write_text(SETTINGS.format(step=22))
    report = job.sync(quiet=True)
    assert (report.files, report.ready) == (1, 2)
    assert steps(hosts.spawn_procs().spawn("second", model())) == [22] * 2
    assert steps(first) == [1] * 2  # running processes keep their version


def test_an_unchanged_tree_transfers_nothing(job: Any) -> None:
    job.sync(quiet=True)
    report = job.sync(quiet=True)
    assert (report.files, report.nbytes) == (0, 0)


def test_a_spawn_on_running_processes_updates_their_code(job: Any, project: Path) -> None:
    job.sync(quiet=True)
    procs = job.state().workers.spawn_procs()
    assert steps(procs.spawn("first", model())) == [1]
    (project / "settings_of_test.py").write_text(SETTINGS.format(step=333))
    job.sync(quiet=True)
    assert steps(procs.spawn("second", model())) == [333]


def test_reload_updates_running_processes_and_reports_old_classes(job: Any, project: Path) -> None:
    job.sync(quiet=True)
    procs = job.state().workers.spawn_procs()
    first = procs.spawn("first", model())
    assert steps(first) == [1]
    kept = first.step.keep()
    (project / "settings_of_test.py").write_text(SETTINGS.format(step=4444))
    job.sync(quiet=True)
    report = procs.reload().get(timeout=60).item(hosts=0)
    assert report["modules"] == ("settings_of_test", "model_of_test")
    assert report["old_classes"] == ("model_of_test.Model",)
    second = procs.spawn("second", model())
    assert steps(second) == [4444]
    assert list(second.same.call(kept).get(timeout=60).values()) == list(kept.get(timeout=60).values()) == [1]


def test_a_syntax_error_is_printed_and_stops_neither_the_sync_nor_the_processes(
    job: Any, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.sync(quiet=True)
    procs = job.state().workers.spawn_procs()
    assert steps(procs.spawn("first", model())) == [1]
    (project / "settings_of_test.py").write_text("STEP = (\n")
    job.sync(quiet=True)
    assert "settings_of_test.py:1:" in capsys.readouterr().err
    with pytest.raises(ActorError, match="SyntaxError"):
        procs.reload().get(timeout=60)
    (project / "settings_of_test.py").write_text(SETTINGS.format(step=5))
    job.sync(quiet=True)
    assert steps(procs.spawn("second", model())) == [5]


def test_a_failed_reload_changes_no_process_and_no_spawn_runs_old_code(job: Any, project: Path) -> None:
    (project / "late_of_test.py").write_text(SETTINGS.format(step=1))
    job.sync(quiet=True)
    procs = job.state().workers.spawn_procs()
    first = procs.spawn("first", model())
    assert steps(first) == [1]
    for name in ("settings_of_test.py", "late_of_test.py"):
        (project / name).write_text(SETTINGS.format(step=22))
    (project / "model_of_test.py").write_text(MODEL + "(\n")
    job.sync(quiet=True)
    with pytest.raises(ActorError, match="SyntaxError"):
        procs.reload().get(timeout=60)
    assert list(first.late.call().get(timeout=60).values()) == [1]
    with pytest.raises(MeshgateError, match="could not load the newest code"):
        steps(procs.spawn("second", model()))
    (project / "model_of_test.py").write_text(MODEL)
    job.sync(quiet=True)
    assert steps(procs.spawn("third", model())) == [22]


def test_a_save_is_pushed_while_watching(job: Any, project: Path) -> None:
    arrived = threading.Event()
    job.sync(watch=True, quiet=True)
    client = job._client
    before = client.code_version
    receive = client._dispatcher.on_sync

    def receive_and_check(header: Any, buffers: Any) -> None:
        receive(header, buffers)
        if client.code_version != before and client.code_version in header.body:
            arrived.set()

    client.on_sync(receive_and_check)
    (project / "settings_of_test.py").write_text(SETTINGS.format(step=66))
    assert arrived.wait(timeout=60)
    assert steps(job.state().workers.spawn_procs().spawn("saved", model())) == [66]


@pytest.mark.parametrize("how", ["reload", "spawn"])
def test_processes_older_than_the_first_sync_get_the_newest_code(job: Any, project: Path, how: str) -> None:
    procs = job.state().workers.spawn_procs()
    assert steps(procs.spawn("first", model())) == [1]
    (project / "settings_of_test.py").write_text(SETTINGS.format(step=2))
    job.sync(quiet=True)
    if how == "reload":
        reports = procs.reload().get(timeout=60).values()
        assert [set(each["modules"]) for each in reports] == [{"settings_of_test", "model_of_test"}]
    assert steps(procs.spawn("second", model())) == [2]


def test_surviving_processes_can_be_updated_after_one_died(job_on_two_hosts: Any, project: Path) -> None:
    job = job_on_two_hosts
    job.sync(quiet=True)
    procs = job.state().workers.spawn_procs()
    first = procs.spawn("first", model())
    dead = first.pid.call().get(timeout=60).item(hosts=0)
    os.kill(dead, signal.SIGKILL)
    with pytest.raises(SupervisionError):
        steps(first)
    survivors = procs.slice(hosts=1)
    (project / "settings_of_test.py").write_text(SETTINGS.format(step=22))
    job.sync(quiet=True)
    assert steps(survivors.spawn("second", model())) == [22]
    (project / "settings_of_test.py").write_text(SETTINGS.format(step=333))
    job.sync(quiet=True)
    with pytest.raises(InvalidRequestError, match=r"cannot reload .*: ranks \[0\] are dead"):
        procs.reload().get(timeout=60)
    assert len(list(survivors.reload().get(timeout=60).values())) == 1
    assert steps(survivors.spawn("third", model())) == [333]


def test_reload_without_a_sync_is_rejected(job: Any) -> None:
    with pytest.raises(InvalidRequestError, match="sync"):
        job.state().workers.spawn_procs().reload()


def test_a_tree_that_is_too_large_is_rejected_with_its_largest_entries(job: Any, project: Path) -> None:
    big = project / "weights.bin"
    with big.open("wb") as file:
        file.truncate(3_000_000_000)
    with pytest.raises(TreeTooLarge, match=r"weights\.bin"):
        job.sync(quiet=True)


SCRIPT = """
import linecache, pathlib
import meshgate as kt

class Mine(kt.Actor):
    @kt.endpoint
    def fail(self):
        raise ValueError("as it was")

CELL = '''class Cell(kt.Actor):
    @kt.endpoint
    def fail(self):
        raise ValueError("in a cell")
'''
linecache.cache["<cell 1>"] = (len(CELL), None, CELL.splitlines(True), "<cell 1>")
exec(compile(CELL, "<cell 1>", "exec"))
with kt.ProcessJob({"workers": 1}) as job:
    procs = job.state().workers.spawn_procs()
    script = pathlib.Path(__file__)
    script.write_text("# another line" * 3 + chr(10) * 2 + script.read_text().replace("as it" + " was", "as it is"))
    for name, Class in (("mine", Mine), ("cell", Cell)):
        try:
            procs.spawn(name, Class).fail.call_one().get(timeout=60)
        except kt.ActorError as error:
            print(error)
"""


def test_a_script_saved_while_it_runs_is_warned_of_and_tracebacks_show_the_running_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert re.search(
        r"StaleCodeWarning: \S*train\.py was saved since this program started, and __main__\.Mine is spawned as it was",
        ran.stderr,
    )
    assert 'raise ValueError("as it was")\nValueError: as it was' in ran.stdout
    assert 'raise ValueError("in a cell")\nValueError: in a cell' in ran.stdout
