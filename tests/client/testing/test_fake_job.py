"""FakeJob: real proxies over the real wire, with actors in threads of this process."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import meshgate as kt
from meshgate.errors import JobUnsupported
from meshgate.testing import FakeJob
from tests.client.laptop import run_without
from tests.client.testing.actors import EVENTS, Answering, Concurrent, Counter, Slow


@pytest.fixture
def job() -> Iterator[FakeJob]:
    with FakeJob({"workers": 2}) as job:
        yield job


@pytest.fixture
def procs(job: FakeJob) -> kt.ProcMeshProxy:
    return job.state().workers.spawn_procs(per_host={"gpus": 2})


@pytest.fixture
def counters(procs: kt.ProcMeshProxy) -> Any:
    return procs.spawn("counters", Counter, 10)


def test_each_rank_has_an_actor_with_its_own_state(counters: Any) -> None:
    assert counters.add.call(1).get().values() == [11, 11, 11, 11]
    assert counters.slice(hosts=1).add.call(amount=5).get().values() == [16, 16]
    assert counters.add.call(0).get().values() == [11, 11, 16, 16]


def test_ranks_and_sizes_are_those_of_the_called_mesh(counters: Any) -> None:
    part = counters.slice(gpus=1)
    assert part.where.call().get().values() == [(0, {"hosts": 2}, 1), (1, {"hosts": 2}, 3)]
    assert counters.slice(hosts=1, gpus=1).name.call_one().get() == "Counter"


def test_choose_and_stream_return_values(counters: Any) -> None:
    assert counters.add.choose(1).get() == 11
    assert sorted(future.get() for future in counters.add.stream(0)) == [10, 10, 10, 11]


def test_arguments_and_results_are_copies(counters: Any) -> None:
    sent = np.zeros(10_000)
    results = counters.first.call(sent).get().values()
    assert sent[0] == 0
    assert [result[0] for result in results] == [7, 7, 7, 7]


def test_an_exception_arrives_with_its_type_rank_host_and_traceback(counters: Any) -> None:
    with pytest.raises(kt.ActorError) as caught:
        counters.fail_on.call(3).get()
    error = caught.value
    assert isinstance(error.exception, KeyError)
    assert (error.rank, error.host, error.total) == (3, "workers-1", 4)
    assert "in fail_on" in str(error)
    assert "fake_process.py" not in str(error)


def test_an_unpicklable_exception_keeps_its_name_and_message(counters: Any) -> None:
    with pytest.raises(kt.ActorError, match="Unpicklable: <unlocked"):
        counters.fail_with_an_unpicklable_error.call().get()


def test_a_constructor_that_raises_fails_calls(procs: kt.ProcMeshProxy) -> None:
    broken: Any = procs.spawn("broken", Counter, -1)
    with pytest.raises(kt.MeshgateError, match="start is negative"):
        broken.add.call(1).get()


def test_async_endpoints_run_in_order(procs: kt.ProcMeshProxy) -> None:
    slow: Any = procs.slice(hosts=0, gpus=0).spawn("slow", Slow)
    slow.add.call_one("a")
    assert slow.add.call_one("b").get() == ["a", "b"]


def test_concurrent_endpoints_overlap(procs: kt.ProcMeshProxy) -> None:
    one: Any = procs.slice(hosts=0, gpus=0).spawn("concurrent", Concurrent)
    waiting = one.wait.call_one()
    one.release.call_one().get()
    assert waiting.get() == "released"


def test_endpoints_can_answer_through_a_port(procs: kt.ProcMeshProxy) -> None:
    answering: Any = procs.spawn("answering", Answering)
    assert answering.answer.call(1).get().values() == [2, 2, 2, 2]


def test_exceptions_sent_through_ports_are_raised_themselves(procs: kt.ProcMeshProxy) -> None:
    answering: Any = procs.spawn("answering", Answering)
    with pytest.raises(LookupError, match=r"^no$"):
        answering.refuse.call("no").get()
    port, receiver = kt.Channel.open()
    answering.send_refusal.broadcast(port, "never")
    with pytest.raises(LookupError, match=r"^never$"):
        receiver.recv().get(10)


def test_channels_receive_what_actors_send(counters: Any) -> None:
    port, receiver = kt.Channel.open()
    counters.send.broadcast(port, "x")
    assert [receiver.recv().get(10) for _ in range(4)] == ["x"] * 4
    port.send("from the driver")
    assert receiver.recv().get(10) == "from the driver"


def test_send_delivers_results_to_a_port(counters: Any) -> None:
    port, receiver = kt.Channel.open_ranked()
    kt.send(counters.add, (1,), {}, port)
    assert sorted(receiver.recv().get(10) for _ in range(4)) == [(rank, 11) for rank in range(4)]


def test_accumulators_fold_results(counters: Any) -> None:
    assert kt.Accumulator(counters.add, 0, operator.add).accumulate(1).get() == 44


def test_a_broadcast_that_raises_is_a_fault(counters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[kt.MeshFailure] = []
    seen = threading.Event()

    def collect(failure: kt.MeshFailure) -> None:
        if failure.mesh_name == "counters":  # the hook also gets late faults of other tests' sessions
            faults.append(failure)
            seen.set()

    monkeypatch.setattr(kt, "unhandled_fault_hook", collect)
    counters.fail_on.broadcast(2)
    assert seen.wait(10)
    assert (faults[0].mesh_name, faults[0].ranks) == ("counters", (2,))
    assert "no such key" in faults[0].report()


def test_the_session_survives_a_cut(job: FakeJob, counters: Any) -> None:
    futures = [counters.add.call(1) for _ in range(20)]
    job.cut()
    futures += [counters.add.call(1) for _ in range(20)]
    assert [future.get().values()[0] for future in futures] == list(range(11, 51))


def test_a_killed_rank_fails_its_calls_and_leaves_the_others(
    job: FakeJob, procs: kt.ProcMeshProxy, counters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[kt.MeshFailure] = []
    monkeypatch.setattr(kt, "unhandled_fault_hook", faults.append)
    EVENTS["held"] = threading.Event()
    counters.initialized.get()  # no actors can be spawned on processes of which one is dead
    pending = counters.wait.call("held")
    job.kill_rank(procs, 3, "out of memory")
    with pytest.raises(kt.SupervisionError, match=r"failed, out of memory\n.*rank 3 of mesh .* on workers-1"):
        pending.get()
    EVENTS.pop("held").set()
    with pytest.raises(kt.SupervisionError):
        counters.add.call(1).get()
    assert counters.slice(hosts=0).add.call(1).get().values() == [11, 11]


def test_a_bootstrap_that_raises_fails_the_processes(job: FakeJob) -> None:
    def bootstrap() -> None:
        raise RuntimeError("no device")

    procs = job.state().workers.spawn_procs(bootstrap=bootstrap)
    with pytest.raises(kt.ActorError, match="no device"):
        procs.initialized.get()
    counters: Any = procs.spawn("counters", Counter)
    with pytest.raises(kt.StepFailedError, match="no device") as caught:
        counters.add.call(1).get()
    assert caught.value.step.startswith("spawn_procs(")


def test_meshes_are_initialized_and_stopped(procs: kt.ProcMeshProxy, counters: Any) -> None:
    assert procs.initialized.get() is True
    counters.add.call(1)
    procs.stop().get()
    with pytest.raises(kt.MeshgateError, match="stopped"):
        counters.add.call(1).get()


def test_a_job_can_be_killed_while_an_endpoint_runs(job: FakeJob, counters: Any) -> None:
    EVENTS["running"] = threading.Event()
    pending = counters.wait.call("running")
    counters.name.call()

    def return_after_the_session() -> None:
        pending.exception(60)
        EVENTS["running"].set()

    returning = threading.Thread(target=return_after_the_session)
    returning.start()
    job.kill()
    returning.join()
    with pytest.raises(kt.MeshgateError):
        pending.get()


def test_several_meshes_have_their_own_hosts() -> None:
    with FakeJob({"trainers": 2, "dataloaders": 1}) as job:
        state = job.state()
        assert (len(state.trainers), len(state.dataloaders)) == (2, 1)


def test_classes_of_a_script_are_run_as_they_are(procs: kt.ProcMeshProxy) -> None:
    class Local(kt.Actor):
        seen: list[int] = []  # noqa: RUF012 - shared on purpose

        @kt.endpoint
        def see(self) -> None:
            self.seen.append(kt.current_rank().rank)

    local: Any = procs.spawn("local", Local)
    local.see.call().get()
    assert sorted(Local.seen) == [0, 1, 2, 3]


def test_unsupported_operations_raise(job: FakeJob, counters: Any) -> None:
    for operation in (job.sync, job.dumps, lambda: job.pull("a", "b"), lambda: FakeJob({"a": 1}).apply("script.py")):
        with pytest.raises(JobUnsupported, match="test it with ProcessJob"):
            operation()
    with pytest.raises(kt.ActorError, match=r"passing a mesh to an actor: test it with ProcessJob"):
        counters.first.call(counters).get()


def test_the_gateway_exists_while_the_job_runs() -> None:
    job = FakeJob({"workers": 1})
    with pytest.raises(kt.JobError, match="not running"):
        job.cut()
    with job:
        job.state()
        assert job.gateway.url.startswith("ws://127.0.0.1:")
    assert not job.active


def test_it_works_without_torchmonarch() -> None:
    out = run_without(
        "monarch",
        code="""
        from meshgate import Actor, Extent, concurrent_endpoint, endpoint
        from meshgate import current_actor_name, current_rank, current_size
        from meshgate.testing import FakeJob

        class Script(Actor):
            @endpoint
            async def where(self, extent: Extent) -> tuple[int, int, str]:
                return current_rank().rank, current_size()["hosts"] * extent["x"], current_actor_name()

            @concurrent_endpoint
            async def concurrent(self) -> int:
                return self.rank

            @endpoint(explicit_response_port=True)
            async def answer(self, port) -> None:
                port.send("answer")

        with FakeJob({"workers": 2}) as job:
            actors = job.state().workers.spawn("script", Script)
            print(actors.where.call(Extent(("x",), (3,))).get().values())
            print(actors.concurrent.call().get().values(), actors.answer.choose().get())
        """,
    )
    assert out.decode() == "[(0, 6, 'Script'), (1, 6, 'Script')]\n[0, 1] answer\n"


def test_notebooks_show_meshes_with_hosts_and_lost_ranks(
    job: FakeJob, procs: kt.ProcMeshProxy, counters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = threading.Event()
    monkeypatch.setattr(kt, "unhandled_fault_hook", lambda failure: lost.set())
    counters.add.call(1).get()
    assert 'title="rank 3 · hosts=1, gpus=1 · workers-1"' in counters._repr_html_()
    assert 'title="rank 2 · gpus=0 · workers-1"' in procs.slice(hosts=1)._repr_html_()
    job.kill_rank(procs, 3, "out of memory & gone")
    assert lost.wait(60)
    for mesh in (counters, procs):
        assert "1 of 4 ranks are lost" in mesh._repr_html_()
        assert "✕3" in mesh._repr_html_()
        assert "out of memory &amp; gone" in mesh._repr_html_()
    assert "lost" not in counters.slice(hosts=0)._repr_html_()
    procs.stop().get()
    assert "was stopped" in counters._repr_html_()


def test_notebooks_show_jobs() -> None:
    job = FakeJob({"workers": 1})
    assert "not applied" in job._repr_html_()
    with job:
        assert "session: none" in (job.apply(), job._repr_html_())[1]
        assert "hosts &#x27;workers&#x27;" in job.state()._repr_html_()
        assert "hosts &#x27;workers&#x27;" in job._repr_html_()


def test_values_that_stay_are_refused(procs: kt.ProcMeshProxy, counters: Any) -> None:
    refusal = r"meshgate\.testing does not support keep\(\) and put\(\): test it with ProcessJob"
    kept = counters.add.keep(1)
    for use in (kept.info, kept.get, procs.put(1).info, counters.add.call(kept).get):
        with pytest.raises(kt.InvalidRequestError, match=refusal):
            use()
