"""Meshes as arguments, and how their processes are started."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.conformance.actors import Owner, Worker
from tests.conformance.cases import Kit, raises


def an_actor_mesh_as_an_argument(kit: Kit) -> None:
    workers = kit.spawn()
    assert kit.one(Owner).call.call_one(workers, "x").get() == ["x"] * 4


def a_slice_as_an_argument(kit: Kit) -> None:
    workers = kit.spawn()
    assert kit.one(Owner).total.call_one(workers.slice(hosts=1)).get() == 1


def host_and_proc_meshes_as_arguments(kit: Kit) -> None:
    owner, procs = kit.one(Owner), kit.procs()
    assert owner.size_of.call_one(kit.hosts).get() == {"hosts": 2}
    assert owner.size_of.call_one(procs.slice(hosts=0)).get() == {"gpus": 2}


def two_actor_meshes_on_the_same_processes(kit: Kit) -> None:
    procs = kit.procs()
    first, second = procs.spawn("first", Worker), procs.spawn("second", Worker, 100)
    assert first.pid.call().get().item(hosts=0, gpus=0) == second.pid.call().get().item(hosts=0, gpus=0)
    assert second.slice(hosts=0, gpus=0).add.call_one(1).get() == 101


def bootstrap_runs_before_actors(kit: Kit) -> None:
    procs = kit.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 1}, bootstrap=_set_variable)
    try:
        assert procs.spawn("worker", Worker).environment.call_one("CONFORMANCE").get() == "set"
    finally:
        procs.stop().get()


def _set_variable() -> None:
    import os

    os.environ["CONFORMANCE"] = "set"


def initialized_raises_when_bootstrap_fails(kit: Kit) -> None:
    procs = kit.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 1}, bootstrap=_fail)
    try:
        procs.initialized.get(timeout=60)
    except kit.api.ActorError as error:
        assert "bootstrap says no" in str(error)
    else:
        raise AssertionError("initialized did not raise")


def _fail() -> None:
    raise ValueError("bootstrap says no")


def a_bootstrap_command_sets_the_environment(kit: Kit) -> None:
    command = kit.api.default_bootstrap_cmd().with_env({"CONFORMANCE": "command"})
    procs = kit.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 1}, bootstrap_command=command)
    try:
        assert procs.spawn("worker", Worker).environment.call_one("CONFORMANCE").get() == "command"
    finally:
        procs.stop().get()


def each_process_has_its_own_bootstrap_command(kit: Kit) -> None:
    def command(point: Any) -> Any:
        return kit.api.default_bootstrap_cmd().with_env({"CONFORMANCE": str(point.rank)})

    procs = kit.hosts.spawn_procs(per_host={"gpus": 2}, bootstrap_command=command)
    try:
        marks = procs.spawn("worker", Worker).environment.call("CONFORMANCE").get()
        assert [mark for _, mark in marks.items()] == ["0", "1", "2", "3"]
    finally:
        procs.stop().get()


def bindings_are_one_for_each_process_of_a_host(kit: Kit) -> None:
    error = raises(ValueError, lambda: kit.hosts.spawn_procs(per_host={"gpus": 4}, proc_bind=[{"cpus": "0"}]))
    assert "proc_bind length (1) must equal procs_per_host (4)" in str(error)


def another_python_starts_the_processes(kit: Kit) -> None:
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "python"
        python.write_text(f'#!/bin/sh\nCONFORMANCE=other exec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        procs = kit.hosts.slice(hosts=0).with_python_executable(str(python)).spawn_procs(per_host={"gpus": 1})
        try:
            assert procs.spawn("worker", Worker).environment.call_one("CONFORMANCE").get() == "other"
        finally:
            procs.stop().get()
