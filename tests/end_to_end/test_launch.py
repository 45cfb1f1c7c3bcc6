"""How processes are started: their command, their Python and their CPUs, through a real gateway and real Monarch."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import meshgate as kt
from meshgate import ActorError, Point, ProcessJob, SupervisionError, default_bootstrap_cmd
from tests.end_to_end.conftest import FaultsOf
from tests.end_to_end.probes import Process
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that marks the processes it runs."""
    path: Path = tmp_path_factory.mktemp("python") / "python"
    path.write_text(f'#!/bin/sh\nSTARTED_BY=other exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_bootstrap_command_sets_the_environment(hosts: Any) -> None:
    command = default_bootstrap_cmd().with_env({"MARK": "one", "HOME": None})
    process = hosts.slice(hosts=0).spawn_procs(bootstrap_command=command).spawn("process", Process)
    assert process.environment.call_one("MARK").get() == "one"
    assert process.environment.call_one("HOME").get() is None
    assert process.environment.call_one("PATH").get() is not None


def test_each_point_can_have_its_own_command(hosts: Any) -> None:
    def command(point: Point) -> kt.BootstrapCommand:
        return default_bootstrap_cmd().with_env({"MARK": f"{point['hosts']}.{point['gpus']}"})

    procs = hosts.spawn_procs(per_host={"gpus": 2}, bootstrap_command=command)
    marks = procs.spawn("processes", Process).environment.call("MARK").get()
    assert [mark for _, mark in marks.items()] == ["0.0", "0.1", "1.0", "1.1"]


def test_a_command_that_cannot_run_fails_the_spawn(hosts: Any) -> None:
    command = kt.BootstrapCommand("/no/such/python")
    process = hosts.slice(hosts=0).spawn_procs(bootstrap_command=command).spawn("process", Process)
    # Which error arrives first depends on Monarch; a ValueError is its own, for the processes.
    with pytest.raises((ActorError, SupervisionError, kt.StepFailedError, ValueError)):
        process.environment.call_one("MARK").get(timeout=120)
    assert hosts.slice(hosts=0).spawn("after", Process).cpus.call_one().get()


def test_another_python_starts_the_processes_and_those_they_spawn(hosts: Any, python: str) -> None:
    other = hosts.with_python_executable(python).slice(hosts=0)
    process = other.spawn("process", Process)
    assert process.environment.call_one("STARTED_BY").get() == "other"
    assert process.nested_environment.call_one("STARTED_BY").get() == "other"
    assert hosts.slice(hosts=0).spawn("usual", Process).environment.call_one("STARTED_BY").get() is None


def test_hosts_with_another_python_can_be_passed_to_actors(hosts: Any, python: str) -> None:
    usual = hosts.slice(hosts=0).spawn("usual", Process)
    other = hosts.slice(hosts=1).with_python_executable(python)
    assert usual.environment_on.call_one(other, "STARTED_BY").get() == "other"


def test_a_process_with_another_minor_version_of_python_is_refused_with_all_versions(
    hosts: Any, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import platform; platform.python_version = lambda: '3.99.1'")
    command = default_bootstrap_cmd().with_env({"PYTHONPATH": str(tmp_path)})
    process = hosts.slice(hosts=0).spawn_procs(bootstrap_command=command).spawn("process", Process)
    monarch, here = version("torchmonarch"), platform.python_version()
    told = (
        f"worker workers-0 has Python 3.99.1 and torchmonarch {monarch}, the gateway has Python {here} and "
        f"torchmonarch {monarch}, and the laptop has Python {here} and torchmonarch {monarch}. Workers need"
    )
    with pytest.raises(kt.StepFailedError, match=re.escape(told)):
        process.cpus.call_one().get(timeout=60)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_processes_are_bound_to_cpus(hosts: Any) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    procs = hosts.slice(hosts=0).spawn_procs(
        per_host={"gpus": 2}, proc_bind=[{"cpus": str(first)}, {"cpus": str(second)}]
    )
    bound = procs.spawn("processes", Process).cpus.call().get()
    assert [cpus for _, cpus in bound.items()] == [[first], [second]]


def test_processes_start_with_the_settings_of_the_program(hosts: Any) -> None:
    one = hosts.slice(hosts=0)
    with kt.config.configured(stop_actor_timeout="33s") as settings:
        changed = one.spawn_procs().spawn("changed", Process)
        assert changed.setting.call_one("stop_actor_timeout").get() == settings["stop_actor_timeout"] == "33s"
    unchanged = one.spawn_procs().spawn("unchanged", Process)
    assert unchanged.setting.call_one("stop_actor_timeout").get() == kt.config.get_global_config()["stop_actor_timeout"]
    with pytest.raises(kt.InvalidRequestError, match=r"Monarch 0\.\S+ has no setting nonsense"):
        kt.config.configure(nonsense=1)


def test_processes_that_do_not_start_in_time_name_the_setting() -> None:
    with ProcessJob({"workers": 1}) as job, kt.config.configured(mesh_proc_spawn_max_idle="1ms"):
        procs = job.state(cached_path=None).workers.spawn_procs()
        with pytest.raises(kt.MeshgateError, match=r"did not start within \d+ m?s\b.*mesh_proc_spawn_max_idle"):
            procs.initialized.get(timeout=60)


def test_a_delivery_timeout_applies_to_the_processes_of_the_session_only() -> None:
    with ProcessJob({"workers": 1}) as job:
        with kt.config.configured(message_delivery_timeout="77s"):
            changed = job.state(cached_path=None).workers.spawn_procs().spawn("changed", Process)
            assert changed.setting.call_one("message_delivery_timeout").get(timeout=60) == "1m 17s"
        unchanged = job.state(cached_path=None).workers.spawn_procs().spawn("unchanged", Process)
        assert unchanged.setting.call_one("message_delivery_timeout").get(timeout=60) != "1m 17s"


def test_a_call_above_the_frame_limit_of_the_program_fails_and_is_a_fault(hosts: Any, faults_of: FaultsOf) -> None:
    faults = faults_of("limited")
    process = hosts.slice(hosts=0).spawn_procs().spawn("limited", Process)
    process.initialized.get(timeout=60)  # what sets up a process is larger than the limit
    with kt.config.configured(codec_max_frame_length=100_000):
        assert process.environment.call_one("x" * 90_000).get(timeout=60) is None
        # Monarch may lose the connection with the message, and then takes the process for crashed.
        oversize = r"rejecting oversize frame: len=1\d{5} > max=100000|timeout waiting for message from proc mesh agent"
        with pytest.raises(SupervisionError, match=rf"(?s)environment\(\) failed, .*({oversize})"):
            process.environment.call_one("x" * 100_000).get(timeout=60)
    wait_for(lambda: faults, "the fault")
