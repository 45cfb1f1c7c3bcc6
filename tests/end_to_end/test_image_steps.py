"""Image steps on real hosts run in order and once; a changed step and all later ones run again."""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meshgate as kt
from meshgate import Image, ImageStepFailed, ProcessJob
from meshgate.images.apply import apply_image
from meshgate_processes.marks import find_processes
from tests.end_to_end.probes import Inspector

pytestmark = pytest.mark.any_release


@pytest.fixture(scope="module")
def job() -> Iterator[ProcessJob]:
    """A job of its own, as files stay in the homes of its hosts."""
    with ProcessJob({"workers": 2, "alone": 1}) as job:
        job.apply()
        yield job


@pytest.fixture(scope="module")
def record(job: ProcessJob) -> Any:
    return job._gateway.record  # type: ignore[union-attr]


@pytest.fixture
def fresh_hosts(record: Any) -> Iterator[Any]:
    """The same hosts in a new session, which does not know which steps have run."""
    with kt.Client(kt.UrlDialer(record.url, record.token)) as client:
        yield client.attach_hosts("workers", 2)


@pytest.fixture
def fresh_host(record: Any) -> Iterator[Any]:
    """As ``fresh_hosts``, but one host, for what does not depend on their number."""
    with kt.Client(kt.UrlDialer(record.url, record.token)) as client:
        yield client.attach_hosts("alone", 1)


def inspect(hosts: Any) -> Any:
    return hosts.spawn_procs().spawn("inspector", Inspector)


def values(mesh: Any) -> list[Any]:
    return list(mesh.get().values())


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_steps_run_once_and_again_from_the_first_change(fresh_hosts: Any, record: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = Image().run_bash(f"echo a >> {log}").run_bash(f"echo b >> {log}").run_bash(f"echo c >> {log}")
    apply_image(fresh_hosts, "workers", first)
    assert sorted(lines(log)) == ["a", "a", "b", "b", "c", "c"]
    with kt.Client(kt.UrlDialer(record.url, record.token)) as other:
        hosts = other.attach_hosts("workers", 2)
        apply_image(hosts, "workers", first)
        assert len(lines(log)) == 6
        changed = Image().run_bash(f"echo a >> {log}").run_bash(f"echo B >> {log}").run_bash(f"echo c >> {log}")
        apply_image(hosts, "workers", changed)
    assert sorted(lines(log)[6:]) == ["B", "B", "c", "c"]


def test_new_processes_see_variables_files_and_directories(fresh_hosts: Any, tmp_path: Path) -> None:
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep" / "data").write_text("deep data")
    script = tmp_path / "script.sh"
    script.write_text("#!/bin/sh\necho printed by the script\n")
    script.chmod(0o755)
    image = (
        Image()
        .set_env_vars({"FLAVOUR": "mint $HOME"})
        .copy(tmp_path / "tree", "tree")
        .copy(script, "bin/")
        .run_bash('echo "$FLAVOUR, $(bin/script.sh)" > output')
    )
    apply_image(fresh_hosts, "workers", image)
    inspector = inspect(fresh_hosts)
    assert values(inspector.variable.call("FLAVOUR")) == ["mint $HOME"] * 2
    assert values(inspector.read.call("tree/deep/data")) == ["deep data"] * 2
    assert values(inspector.executable.call("bin/script.sh")) == [True] * 2
    assert values(inspector.read.call("output")) == ["mint $HOME, printed by the script\n"] * 2


def test_files_with_variables_are_for_their_owner_only(fresh_host: Any) -> None:
    apply_image(fresh_host, "alone", Image().set_env_vars({"PASSWORD": "secret"}))
    modes = inspect(fresh_host).modes.call("environment.json", "image/steps.json", "image")
    assert values(modes) == [["0o600", "0o600", "0o700"]]


def test_variables_that_a_step_no_longer_sets_are_gone(fresh_host: Any, record: Any) -> None:
    apply_image(fresh_host, "alone", Image().set_env_vars({"ONE": "1", "TWO": "2"}))
    with kt.Client(kt.UrlDialer(record.url, record.token)) as other:
        hosts = other.attach_hosts("alone", 1)
        apply_image(hosts, "alone", Image().set_env_vars({"ONE": "one"}))
        inspector = inspect(hosts)
        assert values(inspector.variable.call("ONE")) == ["one"]
        assert values(inspector.variable.call("TWO")) == [None]


def test_a_dockerfile_runs_with_the_variables_of_the_host(fresh_host: Any, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("copied")
    (tmp_path / "Dockerfile").write_text(
        f"FROM anything\nARG WHERE=app\nENV PLACE={tmp_path}/$WHERE-$MESHGATE_HOST_NAME PATH=/more:$PATH\n"
        "WORKDIR $PLACE\nCOPY data here\nRUN echo $WHERE $(cat here) > out\n"
    )
    apply_image(fresh_host, "alone", Image.from_dockerfile(tmp_path / "Dockerfile"))
    inspector = inspect(fresh_host)
    assert values(inspector.read.call("out")) == ["app copied\n"]
    assert values(inspector.variable.call("PLACE")) == [f"{tmp_path}/app-alone-0"]
    assert all(path.startswith("/more:") and "/bin" in path for path in values(inspector.variable.call("PATH")))
    assert values(inspector.variable.call("WHERE")) == [None]


def test_a_failed_step_has_host_code_and_last_lines_and_later_steps_do_not_run(
    fresh_hosts: Any, tmp_path: Path
) -> None:
    after = tmp_path / "after"
    command = 'echo before; if [ "$MESHGATE_HOST_NAME" = workers-1 ]; then echo the reason >&2; exit 7; fi'
    with pytest.raises(ImageStepFailed) as caught:
        apply_image(fresh_hosts, "workers", Image().run_bash(command).run_bash(f"touch {after}"))
    error = caught.value
    assert (error.host, error.exit_code, error.others) == ("workers-1", 7, 0)
    assert error.output == "before\nthe reason"
    assert "failed with exit code 7 on workers-1. Last output:\nbefore\nthe reason" in str(error)
    assert not after.exists()


def test_two_concurrent_sessions_run_a_step_once(job: ProcessJob, record: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    image = Image().run_bash(f"echo started >> {log}; until [ -e {tmp_path}/go ]; do read -t 0.01 < /dev/null; done")

    def run() -> None:
        with kt.Client(kt.UrlDialer(record.url, record.token)) as client:
            apply_image(client.attach_hosts("workers", 2), "workers", image)

    sessions = [threading.Thread(target=run) for _ in range(2)]
    for session in sessions:
        session.start()
    (tmp_path / "go").touch()
    for session in sessions:
        session.join(60)
    assert lines(log) == ["started", "started"]


def test_background_processes_end_with_their_step(fresh_host: Any) -> None:
    apply_image(fresh_host, "alone", Image().run_bash("LEFT_BEHIND=1 sleep 1000 & echo started"))
    assert find_processes("LEFT_BEHIND=1") == []


def test_a_running_step_ends_with_its_session(record: Any, tmp_path: Path) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    client = kt.Client(kt.UrlDialer(record.url, record.token))
    hosts = client.attach_hosts("alone", 1)
    command = f"export LEFT_BEHIND=2; sleep 1000 & echo > {started}; wait"
    failed: list[Exception] = []

    def run() -> None:
        try:
            apply_image(hosts, "alone", Image().run_bash(command))
        except Exception as error:  # noqa: BLE001 - any error that ends the session
            failed.append(error)

    running = threading.Thread(target=run)
    running.start()
    assert started.read_text()  # blocks until a host has started the step
    client.close()
    running.join(60)
    assert failed
    assert all(process.wait_ended(10) for process in find_processes("LEFT_BEHIND=2"))
    assert find_processes("LEFT_BEHIND=2") == []


def test_a_package_is_installed_outside_the_interpreter_and_replaced(
    fresh_host: Any, record: Any, tmp_path: Path
) -> None:
    apply_image(fresh_host, "alone", Image().pip_install([wheel(tmp_path, "1.0"), "--no-index"]))
    assert values(inspect(fresh_host).value_of.call("meshgate_test_package")) == ["1.0"]
    with kt.Client(kt.UrlDialer(record.url, record.token)) as other:
        hosts = other.attach_hosts("alone", 1)
        apply_image(hosts, "alone", Image().pip_install([wheel(tmp_path, "2.0"), "--no-index"]))
        assert values(inspect(hosts).value_of.call("meshgate_test_package")) == ["2.0"]
    with pytest.raises(ImportError):
        __import__("meshgate_test_package")


def test_a_changed_local_package_is_synced(fresh_host: Any, record: Any, tmp_path: Path) -> None:
    package = tmp_path / "meshgate_changed"
    package.mkdir()
    (package / "__init__.py").write_text("VALUE = 1")
    image = Image().sync_package(package)
    apply_image(fresh_host, "alone", image)
    assert values(inspect(fresh_host).value_of.call("meshgate_changed")) == [1]
    (package / "__init__.py").write_text("VALUE = 22")
    apply_image(fresh_host, "alone", image)
    assert values(inspect(fresh_host).value_of.call("meshgate_changed")) == [22]


def test_unused_copies_of_a_local_package_are_removed(fresh_host: Any, tmp_path: Path) -> None:
    package = tmp_path / "meshgate_copied"
    package.mkdir()
    holder = None
    for value in range(1, 6):
        (package / "__init__.py").write_text(f"VALUE = {value}")
        if holder is not None:  # processes of earlier steps take a moment to end
            holder.wait_released.call("synced/meshgate_copied", "meshgate_copied").get(timeout=60)
        apply_image(fresh_host, "alone", Image().sync_package(package))
        holder = holder or inspect(fresh_host)
    assert values(holder.value_of.call("meshgate_copied")) == [1]
    # The one in use, the newest, and the one before it, which the process of the last step used itself.
    assert values(holder.names.call("synced/meshgate_copied")) == [3]


def test_a_jobs_state_runs_the_steps_of_its_image() -> None:
    with ProcessJob({"workers": 1}, image=Image(name="mine").set_env_vars({"FLAVOUR": "lemon"})) as job:
        assert values(inspect(job.state().workers).variable.call("FLAVOUR")) == ["lemon"]


def wheel(directory: Path, version: str) -> str:
    name = "meshgate_test_package"
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"VALUE = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(file, text)
    return str(path)
