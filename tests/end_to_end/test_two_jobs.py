"""Two jobs in one program: calls of both at once, and what cannot pass from one to the other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshgate import Channel, ProcessJob, current_client, use_client
from meshgate.errors import InvalidRequestError, JobNotRunning, UnpicklableArgument
from tests.end_to_end.actors import Worker

Meshes = tuple[Any, Any]


@pytest.fixture(scope="module")
def other_job() -> Any:
    with ProcessJob({"others": 1}) as job:
        job.state()
        yield job


@pytest.fixture(scope="module")
def meshes(job: ProcessJob, other_job: ProcessJob) -> Meshes:
    """One actor in each job, with the same name."""
    here = job.state().workers.slice(hosts=0).spawn_procs(name="procs").spawn("workers", Worker)
    there = other_job.state().others.spawn_procs(name="procs").spawn("workers", Worker)
    return here, there


def test_calls_of_both_jobs_are_gathered(meshes: Meshes) -> None:
    async def both() -> list[Any]:
        return await asyncio.gather(*[mesh.echo.call_one(number) for number in range(10) for mesh in meshes])

    assert asyncio.run(both()) == [number for number in range(10) for _ in meshes]


def test_the_result_of_one_job_is_an_argument_in_the_other(meshes: Meshes) -> None:
    here, there = meshes
    kept = here.echo.keep([1, 2])
    assert there.echo.call_one(kept.get().get(0)).get() == [1, 2]


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda mesh: mesh, "Call it from the program, and pass the result"),
        (lambda mesh: mesh.flatten("rank"), "Call it from the program, and pass the result"),
        (lambda mesh: mesh.echo.keep(1), "Fetch its values with get(), and pass those"),
        (lambda mesh: mesh.echo.keep(1).all(), "Fetch its values with get(), and pass those"),
    ],
    ids=["mesh", "flattened", "kept", "kept all"],
)
def test_what_stands_for_processes_of_the_other_job_is_refused_before_it_is_sent(
    meshes: Meshes, make: Any, remedy: str
) -> None:
    here, there = meshes
    given = make(here)
    for method in (there.echo.call, there.echo.keep, there.echo.broadcast):
        with pytest.raises(InvalidRequestError, match="belongs to another session") as caught:
            method({"nested": [given]})
        assert "Nothing was sent. " in str(caught.value)
        assert remedy in str(caught.value)
    assert there.echo.call_one("still works").get() == "still works"


def test_a_future_is_refused_with_what_to_pass(meshes: Meshes) -> None:
    here, there = meshes
    for mesh in (here, there):
        with pytest.raises(
            UnpicklableArgument, match=r"the FutureProxy at .*\[0\].*a future is not its value. Pass fu"
        ):
            mesh.echo.call([here.echo.call_one(1)])


def test_channels_belong_to_the_job_whose_client_is_used(
    job: ProcessJob, other_job: ProcessJob, meshes: Meshes
) -> None:
    here, there = meshes
    for mine, mesh, foreign in ((job, here, there), (other_job, there, here)):
        with use_client(mine.client):
            assert current_client() is mine.client
            port, receiver = Channel[int].open()
        mesh.send_to.call_one(port, 2).get()
        assert [receiver.recv().get(timeout=60) for _ in range(2)] == [0, 1]
        with pytest.raises(InvalidRequestError, match=r"Open the channel with use_client\(job.client\)"):
            foreign.send_to.call_one(port, 2)


def test_a_job_without_a_session_has_no_client() -> None:
    job = ProcessJob({"workers": 1})
    with pytest.raises(JobNotRunning, match=r"has no session: call state\(\) before client"):
        _ = job.client
    with pytest.raises(JobNotRunning, match=r"has no session: call state\(\) before sync\(\)"):
        job.sync()
