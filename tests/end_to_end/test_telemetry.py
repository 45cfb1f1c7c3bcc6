"""Monarch's telemetry through a gateway: queries, the dashboard and a profile."""

from __future__ import annotations

import glob
import json
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from meshgate import JobError, JobNotRunning, ProcessJob, TelemetryConfig
from tests.end_to_end.actors import Worker
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def observed() -> Iterator[ProcessJob]:
    before = set(glob.glob("/tmp/monarch_*/telemetry.sock"))
    config = TelemetryConfig(include_dashboard=True, dashboard_port=0)
    with ProcessJob({"workers": 2}).enable_telemetry(config) as job:
        job.state()
        yield job
    # Tests on other processes have telemetry meanwhile, whose sockets go as well.
    wait_for(
        lambda: set(glob.glob("/tmp/monarch_*/telemetry.sock")) <= before, "the sockets of telemetry to be removed"
    )


def test_queries_find_actors_and_the_calls_of_every_process(observed: ProcessJob) -> None:
    state = observed.state()
    workers = state.workers.spawn_procs(per_host={"gpus": 2}).spawn("observed", Worker)
    assert len(workers.add.call(1).get()) == 4
    client = observed.telemetry_query_client()
    named = "SELECT count(*) AS n FROM actors WHERE full_name LIKE 'observed<%'"
    wait_for(lambda: client.query(named) == {"rows": [{"n": 4}]}, "the actors to be recorded")
    received = "SELECT count(*) AS n FROM messages WHERE endpoint = 'add'"
    wait_for(lambda: client.query(received) == {"rows": [{"n": 4}]}, "the calls to be recorded")
    if version("torchmonarch") >= "0.8":
        sampled = "SELECT count(*) > 0 AS found FROM host_metrics"
        wait_for(lambda: client.query(sampled) == {"rows": [{"found": True}]}, "the hosts to be sampled")
    with pytest.raises(JobError, match="No field named bogus"):
        client.query("SELECT bogus FROM actors")
    with pytest.raises(JobError, match="telemetry can only be read"):
        client.query("DROP TABLE actors")


def test_the_dashboard_and_the_admin_server_are_reached_from_here(observed: ProcessJob) -> None:
    state = observed.state()
    assert state.dashboard_url == state.telemetry_url
    with urllib.request.urlopen(f"{state.dashboard_url}/", timeout=60) as page:
        assert "Monarch Dashboard" in page.read().decode()
    # Not how many: Monarch records its own mesh "local", too, if telemetry has started when that is made.
    wait_for(lambda: _host_meshes(state.dashboard_url).count("workers") == 1, "the hosts to be recorded")
    assert state.admin_url is not None


def _host_meshes(dashboard_url: str | None) -> list[str]:
    """The names of the host meshes that the dashboard shows."""
    with urllib.request.urlopen(f"{dashboard_url}/api/meshes?class=Host", timeout=60) as meshes:
        return [mesh["given_name"] for mesh in json.load(meshes)]


def test_a_block_can_be_profiled(observed: ProcessJob, tmp_path: Path) -> None:
    procs = observed.state().workers.spawn_procs()
    with observed.profile() as profile:
        procs.spawn("profiled", Worker).add.call(1).get()
    client = observed.telemetry_query_client()
    recorded = "SELECT count(*) > 0 AS found FROM spans WHERE fields_json LIKE '%profiled%'"
    wait_for(lambda: client.query(recorded) == {"rows": [{"found": True}]}, "the spans to be recorded")
    assert profile.export_perfetto_trace(tmp_path / "trace").stat().st_size > 0


def test_a_query_client_needs_telemetry_and_a_running_job(job: ProcessJob) -> None:
    with pytest.raises(RuntimeError, match=r"no distributed telemetry configured. Call enable_telemetry\(\), and then"):
        job.telemetry_query_client()
    with pytest.raises(JobNotRunning):
        ProcessJob({"workers": 1}).profile()
