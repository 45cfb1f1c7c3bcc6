"""Jobs: their meshes, saving and finding them, and their end."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.conformance.actors import Worker
from tests.conformance.cases import Kit, raises


def _echoes(hosts: Any) -> Any:
    procs = hosts.spawn_procs(per_host={"gpus": 1})
    value = procs.spawn("worker", Worker).rank.call().get()
    procs.stop().get()
    return [rank for _, rank in value.items()]


def a_job_has_the_meshes_it_was_made_with(kit: Kit) -> None:
    job = kit.jobs.ProcessJob({"small": 1, "large": 2})
    try:
        state = job.state(cached_path=None)
        assert (dict(state.small.sizes), dict(state.large.sizes)) == ({"hosts": 1}, {"hosts": 2})
        assert _echoes(state.large) == [0, 1]
    finally:
        job.kill()


def a_mesh_that_the_job_lacks_is_an_error(kit: Kit) -> None:
    job = kit.jobs.ProcessJob({"workers": 1})
    try:
        state = job.state(cached_path=None)
        raises((AttributeError, KeyError), lambda: state.trainers)
    finally:
        job.kill()


def the_meshes_of_two_jobs_are_apart(kit: Kit) -> None:
    first, second = (kit.jobs.ProcessJob({"workers": 1}) for _ in range(2))
    try:
        meshes = [job.state(cached_path=None).workers for job in (first, second)]
        pids = [hosts.spawn_procs().spawn("worker", Worker).pid.call_one().get() for hosts in meshes]
        assert pids[0] != pids[1]
        first.kill()
        assert _echoes(meshes[1]) == [0]
    finally:
        first.kill()
        second.kill()


def a_job_can_run_one_of_the_same_specification(kit: Kit) -> None:
    job = kit.jobs.ProcessJob({"workers": 1})
    try:
        job.state(cached_path=None)
        assert job.can_run(kit.jobs.ProcessJob({"workers": 1}))
        assert not job.can_run(kit.jobs.ProcessJob({"workers": 2}))
        assert job.active
    finally:
        job.kill()


def a_saved_job_is_found_again(kit: Kit) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "job.pkl")
        job = kit.jobs.ProcessJob({"workers": 1})
        try:
            pid = _host_pid(job.state(cached_path=path).workers)
            again = kit.jobs.ProcessJob({"workers": 1})
            assert _host_pid(again.state(cached_path=path).workers) == pid
        finally:
            job.kill()


def a_job_travels_as_bytes(kit: Kit) -> None:
    job = kit.jobs.ProcessJob({"workers": 1})
    try:
        pid = _host_pid(job.state(cached_path=None).workers)
        loaded = kit.jobs.job_loads(job.dumps())
        assert _host_pid(loaded.state(cached_path=None).workers) == pid
    finally:
        job.kill()


def _host_pid(hosts: Any) -> int:
    """The pid of the host process, which is the parent of the processes that it starts."""
    procs = hosts.spawn_procs()
    pid: int = procs.spawn("worker", Worker).parent_pid.call_one().get()
    procs.stop().get()
    return pid
