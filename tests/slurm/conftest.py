"""Tests against the cluster of SLURM_CONF, made by the kit of MESHGATE_SLURM_UP.

No job and no gateway may remain after a test. Tests that disturb a node take turns.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import cluster
from tests.slurm.cluster import DISTURBED, connection_pids, kit, queue, run
from tests.waiting import wait_for


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:  # all of the run: as text, because a comparison of paths takes 0.4 s for them
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.timeout(900))  # includes waiting for the disturbed node


@pytest.fixture(scope="module", autouse=True)
def _laptops_connection() -> Iterator[None]:
    """A connection of its own for each module, which stays open when its programs have ended."""
    with tempfile.TemporaryDirectory(prefix="laptop-") as cluster.laptop_directory:
        yield
        for pid in connection_pids():
            os.kill(pid, signal.SIGTERM)


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A name of Slurm jobs of which none is left after the test."""
    monkeypatch.setenv("MESHGATE_PROGRESS", "plain")
    name = f"test-{secrets.token_hex(4)}"
    yield name
    try:
        wait_for(lambda: not queue(name), "the jobs of the test to end", timeout=60)
    finally:
        run("scancel", f"--name={name}")


@pytest.fixture
def disturbed_node() -> Iterator[str]:
    """A node that the test may break; it is repaired afterwards."""
    with open(Path(tempfile.gettempdir()) / "meshgate-slurm-node.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wait_for(node_is_up, f"node {DISTURBED} to be up")
        yield DISTURBED
        kit("node", DISTURBED, "start")
        wait_for(lambda: node_is_up() and not jobs_of_node(), f"node {DISTURBED} to be up again, without jobs")


def jobs_of_node() -> str:
    return run("squeue", "--noheader", f"--nodelist={DISTURBED}")


def node_is_up() -> bool:
    """After a preemption, a node without jobs may be called mixed for minutes."""
    state = run("sinfo", "--noheader", "--Node", f"--nodes={DISTURBED}", "--partition=cpu", "--format=%T")
    return state.strip().rstrip("-") in ("idle", "mixed")
