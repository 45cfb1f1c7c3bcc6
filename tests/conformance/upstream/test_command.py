from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from tests.conformance.upstream.command import main

SOURCE = """
import cloudpickle
import monarch.actor
import monarch._src.actor.actor_mesh as actor_mesh
from isolate_in_subprocess import isolate_in_subprocess
from monarch._src.actor.actor_mesh import Actor, context, current_rank
from monarch._src.actor.endpoint import endpoint
from monarch._src.actor.host_mesh import this_host, this_proc, _spawn_admin
from monarch._src.job.process import ProcessJob
from scoped_state import scoped_state

class Counter(Actor):
    def __init__(self, start):
        self._value = start + context().actor_instance.rank.rank

    @endpoint
    async def value(self, host=None):
        return self._value if host is None else self._value + len(this_host().spawn_procs())

async def test_passes():
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    values = await procs.spawn("counter", Counter, 5).value.call()
    assert sorted(values.values()) == [5, 6]

@isolate_in_subprocess
def test_passes_on_hosts_of_a_job():
    with scoped_state(ProcessJob({"hosts": 2}), cached_path=None) as state:
        values = state.hosts.spawn_procs().spawn("counter", Counter, 0).value.call(True).get()
        assert list(values.values()) == [1, 2]

def test_sends_a_function_by_value_that_uses_modules():
    def value():
        return monarch.actor.current_rank().rank, actor_mesh.context().actor_instance.rank.rank
    assert cloudpickle.loads(cloudpickle.dumps(value)).__code__ == value.__code__

def test_fails_here():
    assert type(this_host()).__module__.startswith("monarch.")

def test_uses_a_private_name():
    _spawn_admin()
"""
ISOLATE = "def isolate_in_subprocess(test):\n    return test\n"
SCOPED_STATE = """
import contextlib

@contextlib.contextmanager
def scoped_state(job, cached_path):
    yield job.state(cached_path=cached_path)
    job.kill()
"""


@pytest.mark.timeout(600)  # three runs of pytest, with a Monarch or a gateway each
def test_each_test_is_run_once_and_in_the_table_with_what_became_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, build = tmp_path / "source", tmp_path / "build"
    tests = source / "python" / "tests"
    tests.mkdir(parents=True)
    for name, text in (("test_a", SOURCE), ("isolate_in_subprocess", ISOLATE), ("scoped_state", SCOPED_STATE)):
        (tests / f"{name}.py").write_text(text)
    assert main([str(source)], build) == 0
    work = build / f"upstream-{importlib.metadata.version('torchmonarch')}"
    rows = json.loads((work / "table.json").read_text())
    assert {row["test"]: row["state"] for row in rows} == {
        "test_passes": "passed on both",
        "test_passes_on_hosts_of_a_job": "passed on both",
        "test_sends_a_function_by_value_that_uses_modules": "passed on both",
        "test_fails_here": "failed here",
        "test_uses_a_private_name": "not applicable",
    }
    reasons = {row["test"]: row["reason"] for row in rows}
    assert reasons["test_uses_a_private_name"].endswith("monarch._src.actor.host_mesh._spawn_admin")
    assert "test_passes_on_hosts_of_a_job" in (work / "table.md").read_text()

    lines = (work / "results.jsonl").read_text().splitlines()
    capsys.readouterr()
    assert main([str(source)], build) == 0  # again
    assert (work / "results.jsonl").read_text().splitlines() == lines
    assert "passed 0 s" not in capsys.readouterr().out
