"""FakeJob does what a real job does: each test here runs on both, with the same assertions."""

from __future__ import annotations

import operator
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import meshgate as kt
from meshgate import MeshgateError, ProcessJob, SupervisionError
from meshgate.testing import FakeJob
from tests.end_to_end.conftest import FaultsOf
from tests.end_to_end.probes import RELEASED, Announcing, AsyncProbe, Probe, refuse_to_start
from tests.waiting import wait_for


def start_fake() -> FakeJob:
    return FakeJob({"workers": 2})


def start_real() -> ProcessJob:
    return ProcessJob({"workers": 2})


@pytest.fixture(scope="module", params=[start_fake, start_real], ids=["fake", "real"])
def job(request: pytest.FixtureRequest) -> Iterator[FakeJob | ProcessJob]:
    start: Callable[[], FakeJob | ProcessJob] = request.param
    with start() as job:
        yield job


@pytest.fixture(scope="module")
def hosts(job: FakeJob | ProcessJob) -> Any:
    return job.state(cached_path=None).workers


@pytest.fixture(scope="module")
def procs(hosts: Any) -> Any:
    return hosts.spawn_procs(per_host={"gpus": 2})


@pytest.fixture(autouse=True)
def _held() -> Iterator[None]:
    RELEASED.clear()
    yield
    RELEASED.set()


@pytest.fixture
def own_procs(hosts: Any) -> Iterator[Any]:
    """One on each host, for a test that ends actors: Monarch spawns no others beside them."""
    procs = hosts.spawn_procs(per_host={"gpus": 1})
    yield procs
    procs.stop().get()


def spawn(procs: Any, name: str, *arguments: Any) -> Any:
    return procs.spawn(name, Probe, *arguments)


def errors_of(failed: Any) -> list[Any]:
    """Of requests for actors that cannot be spawned: some may be in flight when the client learns of it, others are
    made later."""

    def requests() -> list[Any]:
        calls = [failed.add.call(1), failed.slice(hosts=0).add.call(1), failed.add.choose(1), *failed.add.stream(1)]
        return [*calls, failed.initialized]

    return [future.exception(60) for future in requests()] + [future.exception(60) for future in requests()]


def test_slices_keep_state_and_number_their_ranks(procs: Any) -> None:
    probes = spawn(procs, "sliced", 10)
    assert probes.slice(hosts=1).add.call(1).get().values() == [11, 11]
    assert probes.add.call(0).get().values() == [10, 10, 11, 11]
    assert probes.slice(gpus=1).where.call().get().values() == [(0, {"hosts": 2}), (1, {"hosts": 2})]
    assert probes.slice(hosts=0, gpus=1).add.call_one(0).get() == 10


def test_an_exception_has_its_type_rank_host_and_traceback_and_the_actor_goes_on(procs: Any) -> None:
    probes = spawn(procs, "raising")
    with pytest.raises(kt.ActorError) as caught:
        probes.fail_on.call(3).get()
    assert isinstance(caught.value.exception, KeyError)
    assert (caught.value.rank, caught.value.host, caught.value.total) == (3, "workers-1", 4)
    assert "in fail_on" in str(caught.value)

    def are_grouped() -> bool:
        """A real job reports an error 0.25 s after the first rank has failed, with those that have failed by then."""
        with pytest.raises(kt.ActorError) as caught:
            probes.fail_on.call(1, 3).get()
        return "2 of 4 ranks failed, 1 error:\n\nranks 1, 3 (workers-0, workers-1)" in str(caught.value)

    wait_for(are_grouped, "two ranks that fail together", timeout=60)
    outcomes = [future.exception() for future in probes.fail_on.stream(2)]
    assert sorted(type(each).__name__ for each in outcomes) == ["ActorError", "NoneType", "NoneType", "NoneType"]
    assert probes.add.call(1).get().values() == [1, 1, 1, 1]


def test_errors_of_a_slice_name_the_ranks_of_its_mesh_as_output_and_stacks_do(procs: Any) -> None:
    part = spawn(procs, "sliced_errors", 0).slice(hosts=1)
    error = part.fail_on.call(1).exception()  # in an endpoint, the second of two ranks
    assert isinstance(error, kt.ActorError)
    assert (error.rank, error.hosts, error.total) == (3, {3: "workers-1"}, 2)
    assert "failed on rank 3 (workers-1)" in str(error)
    (streamed,) = filter(None, [future.exception() for future in part.fail_on.stream(1)])
    assert isinstance(streamed, kt.ActorError)
    assert streamed.rank == 3


def test_choose_takes_every_rank(procs: Any) -> None:
    probes = spawn(procs, "chosen")
    assert {probes.rank_number.choose().get() for _ in range(100)} == {0, 1, 2, 3}  # misses one of them in 1e-12
    port, receiver = kt.Channel.open()
    for _ in range(100):
        kt.send(probes.rank_number, (), {}, port, "choose")
    assert {receiver.recv().get(60) for _ in range(100)} == {0, 1, 2, 3}


def test_actors_of_one_process_run_at_once_and_each_one_call_at_a_time(procs: Any) -> None:
    first, second = spawn(procs, "first"), spawn(procs, "second")
    port, receiver = kt.Channel.open()
    sleeping = first.sleep.call(port)
    queued = first.add.call(1)
    assert [receiver.recv().get(60) for _ in range(4)] == ["asleep"] * 4
    assert second.add.call(1).get().values() == [1, 1, 1, 1]
    assert not queued.done()
    assert not sleeping.done()
    second.release.call().get()
    sleeping.get()
    queued.get()


def test_channels_keep_order_and_carry_exceptions(procs: Any) -> None:
    one = spawn(procs, "sending").slice(hosts=0, gpus=0)
    port, receiver = kt.Channel.open()
    one.send.call_one(port, 20).get()
    assert [receiver.recv().get(60) for _ in range(20)] == list(range(20))
    one.refuse.broadcast(port)
    with pytest.raises(LookupError, match=r"^no$"):
        receiver.recv().get(60)
    assert kt.Accumulator(spawn(procs, "folded", 5).add, 0, operator.add).accumulate(1).get() == 24


def test_what_is_no_exception_ends_the_actor_of_its_rank(own_procs: Any, faults_of: FaultsOf) -> None:
    errors = {error.__name__: error for error in (SystemExit, KeyboardInterrupt, GeneratorExit)}
    faults = faults_of(*errors)
    meshes = {name: spawn(own_procs, name) for name in errors}
    for name, probes in meshes.items():
        for _ in range(2):
            with pytest.raises(SupervisionError, match=rf"(?s)aborted due to: .*{name}.*rank 1 .*on workers-1"):
                probes.end_on.call(1, errors[name]).get()
        assert probes.slice(hosts=0).add.call(1).get().values() == [1]
    wait_for(
        lambda: sorted((each.mesh_name, each.ranks) for each in faults) == [(name, (1,)) for name in sorted(errors)],
        "the faults to be reported",
    )
    for error in errors_of(spawn(own_procs, "beside")):
        assert type(error) is kt.SpawnFailed
        assert isinstance(error.__cause__, SupervisionError)
        assert "spawn new processes" in str(error)
    assert spawn(own_procs.slice(hosts=0), "apart").add.call(1).get().values() == [1]


def test_an_actor_on_a_slice_of_processes_that_ends_fails_its_call_and_is_reported_at_its_rank(
    own_procs: Any, faults_of: FaultsOf
) -> None:
    faults = faults_of("on a slice")
    probes = spawn(own_procs.slice(hosts=1), "on a slice")
    with pytest.raises(SupervisionError, match=r"(?s)SystemExit: 3.*on workers-1"):
        probes.end_on.call(0, SystemExit).get(60)
    wait_for(lambda: faults, "the fault to be reported")
    assert [(each.ranks, dict(each.hosts)) for each in faults] == [((1,), {1: "workers-1"})]


def test_sys_exit_in_an_async_endpoint_ends_the_actor(own_procs: Any, faults_of: FaultsOf) -> None:
    faults = faults_of("exiting")
    exiting: Any = own_procs.slice(hosts=0).spawn("exiting", AsyncProbe)
    with pytest.raises(SupervisionError, match="SystemExit: 3"):
        exiting.end.call().get()
    wait_for(lambda: faults, "the fault to be reported")


@pytest.mark.parametrize("rank", [-1, 1])
def test_a_constructor_that_raises_ends_its_actor(own_procs: Any, faults_of: FaultsOf, rank: int) -> None:
    faults = faults_of("broken")
    broken = spawn(own_procs, "broken", 0, rank)
    with pytest.raises(SupervisionError, match=r"(?s)aborted due to: .*ValueError: start is negative"):
        broken.add.call(1).get()
    with pytest.raises(SupervisionError, match="start is negative"):
        broken.slice(hosts=1).add.call(1).get()
    wait_for(lambda: {each.ranks for each in faults} == ({(1,)} if rank == 1 else {(0,), (1,)}), "all faults")
    if rank == 1:
        sound = broken.slice(hosts=0).add
        (before,) = sound.call(0).get().values()  # 0 if the other rank had failed before the first call was sent
        assert sound.call(1).get().values() == [before + 1]


def test_calls_after_a_bootstrap_that_raises_raise_an_actor_error(hosts: Any) -> None:
    procs = hosts.spawn_procs(bootstrap=refuse_to_start)
    probes = spawn(procs, "started")
    for error in errors_of(probes) + errors_of(spawn(procs, "later")):
        assert type(error) is kt.BootstrapFailed
        assert re.search(r"(?s)earlier step failed: spawn_procs\(.*ValueError: no device", str(error))
    for own in (procs.initialized, procs.stop()):
        assert type(own.exception(60)) is kt.ActorError
        assert "ValueError: no device" in str(own.exception(60))


@pytest.mark.parametrize("request_", ["initialized", "stop"])
def test_a_request_that_is_in_flight_when_a_bootstrap_raises_raises_its_error(hosts: Any, request_: str) -> None:
    own = hosts.spawn_procs(bootstrap=refuse_to_start, name="own")
    asked = own.initialized if request_ == "initialized" else own.stop()
    with pytest.raises(kt.ActorError, match=rf"own.{request_} failed: ValueError: no device"):
        asked.get(60)
    probes = spawn(hosts.spawn_procs(bootstrap=refuse_to_start), "probes")
    with pytest.raises(kt.BootstrapFailed, match=rf"(?s)probes.{request_} could not run because.*no device"):
        (probes.initialized if request_ == "initialized" else probes.stop()).get(60)


def test_no_actor_starts_in_processes_of_which_a_bootstrap_raised(hosts: Any) -> None:
    port, receiver = kt.Channel.open()
    hosts.spawn_procs(bootstrap=refuse_to_start).spawn("starting", Announcing, port)
    sound = hosts.spawn_procs().spawn("sound", Announcing, port)
    sound.announce.call("second").get()
    assert [receiver.recv().get(60) for _ in range(4)].count("started") == 2


def test_a_broadcast_that_raises_is_a_fault_and_ends_its_actor(own_procs: Any, faults_of: FaultsOf) -> None:
    faults = faults_of("broadcasting")
    probes = spawn(own_procs, "broadcasting")
    probes.fail_on.broadcast(1)
    wait_for(lambda: faults, "the fault to be reported")
    assert (faults[0].mesh_name, faults[0].ranks) == ("broadcasting", (1,))
    assert "KeyError: 'no such key'" in faults[0].report()
    with pytest.raises(SupervisionError, match="no such key"):
        probes.add.call(1).get()
    assert probes.slice(hosts=0).add.call(1).get().values() == [1]


def test_a_call_behind_a_broadcast_that_raises_does_not_run(hosts: Any, faults_of: FaultsOf) -> None:
    names = [f"broadcasting {number}" for number in range(8)]
    faults = faults_of(*names)
    for name in names:
        procs = hosts.slice(hosts=0).spawn_procs()
        probes = spawn(procs, name)
        probes.fail_on.broadcast(0)
        with pytest.raises(SupervisionError, match="no such key"):
            probes.add.call(1).get()
    wait_for(lambda: len(faults) == len(names), "the faults to be reported")


def test_a_rank_that_raises_fails_the_call_although_others_run(procs: Any) -> None:
    probes, others = spawn(procs, "gathering"), spawn(procs, "others")
    port, receiver = kt.Channel.open()
    with pytest.raises(kt.ActorError, match=r"failed on rank 1 .*\(3 had not answered yet\): KeyError"):
        probes.sleep_or_fail.call(port, 1).get(40)  # the others sleep for 60 s
    assert [receiver.recv().get(60) for _ in range(3)] == ["asleep"] * 3
    others.release.call().get()


def test_a_killed_process_is_a_fault_of_its_actors(job: FakeJob | ProcessJob, hosts: Any, faults_of: FaultsOf) -> None:
    faults = faults_of("first", "second")
    procs = hosts.spawn_procs()
    first, _ = spawn(procs, "first"), spawn(procs.slice(hosts=1), "second")
    pids = first.pid.call().get().values()
    if isinstance(job, FakeJob):
        job.kill_rank(procs, 1)
    else:
        os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: len(faults) == 2, "the faults")
    assert sorted((each.mesh_name, each.ranks) for each in faults) == [("first", (1,)), ("second", (1,))]


def test_actors_are_spawned_in_living_processes_alone_and_not_stopped_without_the_dead(
    job: FakeJob | ProcessJob, hosts: Any, faults_of: FaultsOf
) -> None:
    faults = faults_of("dying")
    procs = hosts.spawn_procs()
    dying = spawn(procs, "dying")
    pids = dying.pid.call().get().values()
    if isinstance(job, FakeJob):
        job.kill_rank(procs, 1)
    else:
        os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: faults, "the fault")
    late, refused = spawn(procs, "late"), r"(?s)spawned on ranks 1 of .*Spawn on a slice of the living ranks"
    with pytest.raises(kt.StepFailedError, match=refused):
        late.add.call(1).get(20)  # Monarch itself waits for the dead one for 30 s
    assert spawn(procs.slice(hosts=0), "living").add.call_one(1).get(60) == 1
    with pytest.raises(
        SupervisionError, match=r"(?s)'dying' were not stopped, because rank 1 has ended: .*stop\(\) of"
    ):
        dying.stop().get(60)
    procs.stop().get(60)


@pytest.mark.parametrize("whole", [True, False], ids=["procs", "actors"])
def test_stop_does_not_wait_for_calls_and_fails_them(hosts: Any, whole: bool) -> None:
    procs = hosts.spawn_procs(per_host={"gpus": 1})
    probes = spawn(procs, "stopping")
    port, receiver = kt.Channel.open()
    pending = probes.sleep.call(port)
    queued = probes.add.call(1)
    for _ in range(2):
        receiver.recv().get(60)
    stopping = time.monotonic()
    (procs if whole else probes).stop("enough").get()
    assert time.monotonic() - stopping < 50  # the call takes 60 s
    for call in (pending, queued, probes.add.call(1)):
        with pytest.raises(MeshgateError, match="stopped"):
            call.get()
    with pytest.raises(
        SupervisionError, match=r"(?s)mesh 'stopping' was stopped: enough.*ranks 0-1 of mesh 'stopping'"
    ):
        pending.get()
    (procs if whole else probes).stop().get()
    procs.stop().get()


def test_initialized_does_not_wait_for_calls(procs: Any) -> None:
    probes, others = spawn(procs, "busy"), spawn(procs, "others")
    port, receiver = kt.Channel.open()
    sleeping = probes.sleep.call(port)
    assert [receiver.recv().get(60) for _ in range(4)] == ["asleep"] * 4
    probes.initialized.get()
    assert not sleeping.done()
    others.release.call().get()
    sleeping.get()


def test_a_call_can_be_waited_for_in_threads(procs: Any) -> None:
    probes = spawn(procs, "shared")
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.extend(probes.add.call(1).get().values()[:1])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(1, 9))
