"""What jobs offer besides their meshes. How it works with hosts is tested end to end."""

from __future__ import annotations

from typing import Any

import pytest

from meshgate.errors import JobNotRunning, JobUnsupported
from meshgate.session import gateway_client
from meshgate_wire.status import JobStatus, MeshStatus, OutputPage, SessionStatus
from tests.client.jobs.fake_job import FakeJob


class DialledJob(FakeJob):
    def _dialer(self) -> str:  # type: ignore[override]
        return "the route"


def test_the_status_is_what_the_gateway_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "/v1/status": JobStatus(gateway_version="1", python="3.11", meshes={"workers": 2}).model_dump(),
        "/v1/output?a=1&b=2": OutputPage().model_dump(),
    }
    monkeypatch.setattr(gateway_client, "request_json", lambda dialer, path: (dialer, answers[path])[1])
    job = DialledJob(2)
    job.apply()
    assert job.status().meshes == {"workers": 2}
    assert job._output({"a": 1, "b": 2}) == OutputPage()
    job.kill()


def test_reading_output_forgets_ended_sessions_but_not_those_that_answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    running = [SessionStatus(session="late", owner="me", connected=True, pid=1, problem="its engine did not answer")]
    status = JobStatus(gateway_version="1", python="3.11", meshes={}, sessions=tuple(running)).model_dump()
    asked: list[str] = []

    def answer(dialer: Any, path: str) -> Any:
        asked.append(path)
        return status if path == "/v1/status" else OutputPage().model_dump()

    monkeypatch.setattr(gateway_client, "request_json", answer)
    job = DialledJob(2)
    job.apply()
    seen = {"late": 7}
    for session in range(1000):
        seen[f"{session:032}"] = 1
        job._output(seen)
    assert max(map(len, asked)) < 4096  # gateways accept 8 KiB and 256 sessions
    assert asked.count("/v1/status") < 20
    assert all("late=7" in path for path in asked if path != "/v1/status")
    job.kill()


def test_a_job_that_does_not_run_has_no_status() -> None:
    with pytest.raises(JobNotRunning, match=r"it is not running. Call state\(\) before status\(\)"):
        DialledJob(2).status()
    job = FakeJob(2)
    job.apply()
    with pytest.raises(JobUnsupported, match="FakeJob does not say how to reach its gateway"):
        job.status()
    job.kill()


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["meshgate_exec"], "name one of the proc meshes: there is none"),
        (["b", "a"], "name one of the proc meshes: a, b"),
    ],
)
def test_the_only_proc_mesh_needs_no_name(monkeypatch: pytest.MonkeyPatch, names: list[str], text: str) -> None:
    def answer(*names: str) -> Any:
        meshes = tuple(MeshStatus(kind="procs", name=name, sizes={}) for name in (*names, "meshgate_stacks"))
        session = SessionStatus(session="s", owner="me", connected=True, pid=1, meshes=meshes)
        return JobStatus(gateway_version="1", python="3.11", meshes={}, sessions=(session,)).model_dump()

    job = DialledJob(2)
    job.apply()
    monkeypatch.setattr(gateway_client, "request_json", lambda dialer, path: answer("trainers"))
    assert job._only_procs() == "trainers"
    monkeypatch.setattr(gateway_client, "request_json", lambda dialer, path: answer(*names))
    with pytest.raises(ValueError, match=text):
        job._only_procs()
    job.kill()
