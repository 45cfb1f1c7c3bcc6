"""Values that stay in the cluster: ``keep()``, ``put()`` and the calls that use them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

import meshgate as kt
from benchmarks.workload import Target
from meshgate import (
    ActorError,
    Channel,
    InvalidRequestError,
    MeshgateError,
    ProcessJob,
    SupervisionError,
    ValueLostError,
    job_load,
    send,
)
from meshgate.testing import NetworkProxy
from tests.end_to_end.keepers import (
    Blocking,
    Concurrent,
    Maker,
    PortReplier,
    Receiver,
    Referrer,
    Taker,
    Unhappy,
)
from tests.end_to_end.test_server_restart import kill_server
from tests.waiting import Printed, wait_for

MB = 2**20
TIMEOUT = 120.0


@pytest.fixture(scope="module")
def makers(hosts: Any) -> Any:
    return hosts.spawn_procs(per_host={"gpus": 2}, name="made").spawn("makers", Maker)


@pytest.fixture(scope="module")
def takers(hosts: Any) -> Any:
    return hosts.spawn_procs(per_host={"gpus": 2}, name="taken").spawn("takers", Taker)


def counts(makers: Any) -> set[tuple[int, int]]:
    """How many values and deliveries each process has."""
    found = makers.kept.call().get(TIMEOUT).values()
    return {(each["values"], each["deliveries"]) for each in found}


def test_each_rank_gets_the_value_of_its_own_rank_and_the_process_itself_the_object(makers: Any, takers: Any) -> None:
    made = makers.make.keep(1000)
    assert list(takers.first_byte.call(made).get(TIMEOUT).values()) == [0, 1, 2, 3]
    assert all(makers.is_made_here.call(made).get(TIMEOUT).values())
    (info, *_) = made.info(TIMEOUT).values()
    assert (info.type, info.bytes // 100, info.shape) == ("bytearray", 10, None)
    assert repr(made) == "<KeptMesh makers.make.keep(): {hosts: 2, gpus: 2}, 0.0 MB>"
    assert [each[0] for each in made.get(TIMEOUT).values()] == [0, 1, 2, 3]
    assert (made.sizes, len(made), len(made.slice(hosts=1))) == ({"hosts": 2, "gpus": 2}, 4, 2)


def test_parts_single_values_and_all_values_can_be_passed_in_any_argument(makers: Any, takers: Any) -> None:
    made = makers.make.keep(10)
    one = made.slice(hosts=1, gpus=0)
    assert set(takers.first_byte.call(one).get(TIMEOUT).values()) == {2}
    assert set(takers.first_byte.call(made.slice(hosts=0, gpus=slice(1, 2))).get(TIMEOUT).values()) == {1}
    assert list(takers.slice(hosts=0).first_byte.call(made.slice(hosts=1)).get(TIMEOUT).values()) == [2, 3]
    assert list(takers.slice(gpus=1).first_byte.call(made.slice(gpus=1)).get(TIMEOUT).values()) == [1, 3]
    assert takers.all_first_bytes.call(made.all()).get(TIMEOUT).get(3) == [0, 1, 2, 3]
    assert takers.all_first_bytes.call(made.slice(hosts=1).all()).get(TIMEOUT).get(0) == [2, 3]
    assert makers.slice(hosts=1, gpus=1).add.call_one(one, 40).get(TIMEOUT) == 42
    pairs = takers.first_byte.call(made, more={"deep": [one, one]}).get(TIMEOUT)
    assert list(pairs.values()) == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert sorted(future.get(TIMEOUT) for future in takers.first_byte.stream(made)) == [0, 1, 2, 3]
    assert takers.first_byte.choose(made).get(TIMEOUT) in range(4)
    takers.first_byte.broadcast(made)
    assert [each[0] for each in made.slice(gpus=1).get(TIMEOUT).values()] == [1, 3]
    assert one.get(TIMEOUT).item()[0] == 2


def test_a_chosen_rank_gets_the_value_of_its_rank(makers: Any) -> None:
    made = makers.make.keep(10)
    assert {makers.is_made_here.choose(made).get(TIMEOUT) for _ in range(8)} == {True}


def test_a_kept_mesh_can_be_awaited(makers: Any, takers: Any) -> None:
    async def main() -> tuple[list[int], Any]:
        made = makers.make.keep(10)
        return [each[0] for each in (await made).values()], await takers.first_byte.call(made)

    fetched, taken = asyncio.run(main())
    assert fetched == list(taken.values()) == [0, 1, 2, 3]


def test_results_of_calls_with_kept_values_can_stay_too(makers: Any, takers: Any) -> None:
    sums = makers.add.keep(makers.make.keep(10), 1)
    assert list(sums.get(TIMEOUT).values()) == [1, 2, 3, 4]
    failed = makers.add.keep(takers.first_byte.keep(makers.make.keep(10)), 1)
    with pytest.raises(ActorError, match="not subscriptable"):
        failed.get(TIMEOUT)


def test_arrays_arrive_while_the_actors_class_imports_numpy(hosts: Any, procs: Any) -> None:
    """On two threads of a process, one of which unpickles the array: with it, Python imports parts of numpy."""
    given = procs.spawn("givers", Target).slice(hosts=0, gpus=0).give.keep(1000)
    given.info(TIMEOUT)
    importing = hosts.spawn_procs(per_host={"gpus": 2}, name="importing")
    put, taken = importing.put(np.ones(8)), importing.spawn("takers", Target).take
    assert set(taken.call(given).get(TIMEOUT).values()) == {1000}
    assert set(taken.call(put).get(TIMEOUT).values()) == {64}


def test_constructors_take_kept_values(makers: Any, procs: Any) -> None:
    made = makers.make.keep(10)
    taken = procs.spawn("constructed", Taker, made)
    del made
    assert list(taken.given.call().get(TIMEOUT).values()) == [0, 1, 2, 3]


def test_what_is_put_once_serves_many_calls(makers: Any, takers: Any) -> None:
    data = makers.put([7] * 100)
    assert [set(makers.add.call(data, number).get(TIMEOUT).values()) for number in range(3)] == [{7}, {8}, {9}]
    assert set(takers.first_byte.call(data).get(TIMEOUT).values()) == {7}
    assert makers._procs.put(b"x").info(TIMEOUT).get(0).type == "bytes"


def test_what_is_put_can_be_made_of_kept_values(makers: Any, takers: Any) -> None:
    made = makers.make.keep(10)
    copied, same = takers.put({"deep": [made, made.slice(hosts=1, gpus=0), made.all()]}), makers.put(made)
    del made
    gc.collect()
    found = [each["deep"] for each in copied.get(TIMEOUT).values()]
    assert [(own[0], one[0], [each[0] for each in whole.values()]) for own, one, whole in found] == [
        (rank, 2, [0, 1, 2, 3]) for rank in range(4)
    ]
    assert all(makers.is_made_here.call(same).get(TIMEOUT).values())
    del copied, same
    gc.collect()
    wait_for(lambda: counts(makers) == {(0, 0)}, "the values to be dropped")
    with pytest.raises(ActorError, match="no sample"):
        takers.put(makers.fail.keep(2)).info(TIMEOUT)


def test_messages_to_the_ports_of_actors_take_kept_values(makers: Any, procs: Any) -> None:
    receivers = procs.spawn("receivers", Receiver).slice(hosts=0, gpus=0)
    port = receivers.open.call_one().get(TIMEOUT)
    made = makers.make.keep(10)
    port.send(made.slice(hosts=1, gpus=0))
    port.send({"all": made.slice(hosts=1).all(), "one": [made.slice(hosts=0, gpus=1)]})  # from the same process
    del made
    gc.collect()
    taken = [receivers.receive.call_one().get(TIMEOUT) for _ in range(2)]
    assert taken == [2, {"all": [2, 3], "one": 1}]
    wait_for(lambda: counts(makers) == {(0, 0)}, "the values to be dropped")


def test_a_message_that_cannot_be_sent_harms_no_values(makers: Any, hosts: Any, printed: Printed) -> None:
    made, receiving = makers.make.keep(10).slice(hosts=1, gpus=0), hosts.slice(hosts=0).spawn_procs()
    port = receiving.spawn("receivers", Receiver).open.call_one().get(TIMEOUT)
    receiving.stop().get(TIMEOUT)
    port.send(made)
    assert set(makers.add.call(made, 1).get(TIMEOUT).values()) == {3}
    own, receiver = Channel.open()
    own.send(makers.fail.keep(2).slice(hosts=0, gpus=0))
    own.send(made)  # to the laptop
    assert receiver.recv().get(TIMEOUT)[0] == 2
    makers.add.broadcast(makers.fail.keep(2), 1)
    whats = ("message to a channel", "broadcast of add")
    wait_for(lambda: all(f"a {what} was not sent: " in printed.err for what in whats), "the warnings")


def test_replies_of_a_call_with_kept_values_can_go_to_a_channel(makers: Any, takers: Any) -> None:
    made = makers.make.keep(10)
    port, receiver = Channel.open_ranked()
    send(takers.first_byte, (made,), {}, port)
    assert sorted(receiver.recv().get(TIMEOUT) for _ in range(4)) == [(rank, rank) for rank in range(4)]
    for _ in range(4):
        send(makers.is_made_here, (made,), {}, port, selection="choose")
    assert {receiver.recv().get(TIMEOUT)[1] for _ in range(4)} == {True}


def test_a_concurrent_endpoint_keeps_what_it_returns(procs: Any, takers: Any) -> None:
    concurrent = procs.spawn("concurrent", Concurrent)
    made = [concurrent.make.keep(size) for size in (10, 20)]
    concurrent.make.call(1).get(TIMEOUT)
    assert [made[index].info(TIMEOUT).get(0).bytes for index in (0, 1)] == [43, 53]
    assert list(takers.first_byte.call(made[1]).get(TIMEOUT).values()) == [0, 1, 2, 3]


def test_an_endpoint_with_a_port_keeps_what_it_sends_to_it(procs: Any, takers: Any) -> None:
    sent = procs.spawn("repliers", PortReplier).reply.keep()
    assert set(takers.first_byte.call(sent).get(TIMEOUT).values()) == {9}


def test_a_mesh_of_another_extent_is_refused_before_anything_is_sent(makers: Any, takers: Any, procs: Any) -> None:
    made = makers.make.keep(10)
    with pytest.raises(ValueError, match=r"takers\.first_byte runs on \{gpus: 2\}, but .* \{hosts: 2, gpus: 2\}"):
        takers.slice(hosts=0).first_byte.call(made)
    with pytest.raises(ValueError, match=r"new\.__init__ runs on \{hosts: 2\}, but .* \{gpus: 2\}"):
        procs.slice(gpus=0).spawn("new", Taker, made.slice(hosts=0))
    renamed = made.slice(hosts=0).rename(gpus="hosts")
    assert list(takers.slice(gpus=0).first_byte.call(renamed).get(TIMEOUT).values()) == [0, 1]


def test_released_values_are_refused(makers: Any, takers: Any) -> None:
    made = makers.make.keep(10)
    made.release()
    with pytest.raises(InvalidRequestError, match="released with release"):
        takers.first_byte.call(made)
    assert repr(made).endswith("released>")


def test_a_value_above_the_frame_limit_is_refused_and_its_process_lives_on(hosts: Any) -> None:
    with kt.config.configured(codec_max_frame_length=4 * MB):
        makers = hosts.slice(hosts=0).spawn_procs(name="limited").spawn("makers", Maker)
        takers = hosts.slice(hosts=1).spawn_procs(name="limited too").spawn("takers", Taker)
        made = makers.make.keep(4 * MB)
        for future in (takers.first_byte.call(made), takers.all_first_bytes.call(made.all())):
            with pytest.raises(ActorError, match=r"the value has 4\.2 MB, but .* codec_max_frame_length, 4\.2 MB"):
                future.get(TIMEOUT)
        assert all(makers.is_made_here.call(made).get(TIMEOUT).values())
        assert takers.first_byte.call_one(makers.make.keep(3 * MB)).get(TIMEOUT) == 0


def test_an_error_of_the_kept_call_is_that_of_each_use(
    makers: Any, takers: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    failed = makers.fail.keep(2)
    of_failed = makers.add.keep(takers.first_byte.keep(failed), 1)  # neither call runs
    for future in (takers.first_byte.call(failed), makers.add.call(of_failed, 1), takers.put(of_failed)._fetch()):
        with pytest.raises(ActorError, match="could not run, because the call whose result it takes failed") as raised:
            future.get(TIMEOUT)
        assert isinstance(raised.value.exception, ValueError)
        assert "Actor call makers.fail.keep() failed on rank 2" in str(raised.value)
    for each in (failed, of_failed):
        with pytest.raises(ActorError, match="no sample"):
            each.get(TIMEOUT)
    assert repr(failed).endswith("failed: ActorError>")
    wait_for(lambda: counts(makers) == {(0, 0)}, "the values to be dropped")
    del failed, of_failed
    gc.collect()
    assert "has not read its result" not in capfd.readouterr().err


def test_a_constructor_that_takes_a_failed_value_names_the_call(makers: Any) -> None:
    failed = makers.fail.keep(2)
    taken = makers._procs.spawn("unhappy", Taker, failed)
    with pytest.raises(ActorError, match=r"makers\.fail\.keep\(\) failed .*: get\(\) of its kept mesh raises"):
        taken.given.call().get(TIMEOUT)
    with pytest.raises(ActorError, match="no sample"):
        failed.get(TIMEOUT)


def test_a_failed_call_whose_values_are_not_used_is_reported(makers: Any, printed: Printed) -> None:
    failed = makers.fail.keep(1)
    wait_for(failed._values.described.done, "the description")
    del failed

    def reported() -> bool:
        gc.collect()
        return "a call of makers.fail.keep() failed, and the program has not read its result" in printed.err

    wait_for(reported, "the report")


def test_values_are_dropped_with_their_last_reference(makers: Any, takers: Any) -> None:
    made = makers.make.keep(10)
    part = made.slice(hosts=0)
    takers.first_byte.call(made).get(TIMEOUT)
    assert counts(makers) == {(1, 0)}
    del made
    gc.collect()
    assert [each[0] for each in part.get(TIMEOUT).values()] == [0, 1]
    used = makers.add.call(part.slice(gpus=0), 1)  # under way when the reference is gone
    del part
    gc.collect()
    assert set(used.get(TIMEOUT).values()) == {1}
    wait_for(lambda: counts(makers) == {(0, 0)}, "the values to be dropped")
    makers.make.keep(10)  # of which the program uses nothing
    wait_for(lambda: counts(makers) == {(0, 0)}, "the values to be dropped")


def test_memory_stays_flat_when_values_are_kept_and_dropped(makers: Any, takers: Any) -> None:
    for _ in range(200):
        made = makers.make.keep(10)
        last = takers.first_byte.call(made)
    assert list(last.get(TIMEOUT).values()) == [0, 1, 2, 3]
    del made
    gc.collect()
    wait_for(lambda: counts(makers) == {(0, 0)}, "the values to be dropped")


def test_values_do_not_cross_the_link_of_the_laptop(job: Any) -> None:
    with (
        NetworkProxy("127.0.0.1", urlsplit(job.gateway_url).port or 0) as proxy,
        kt.Client(kt.UrlDialer(f"ws://127.0.0.1:{proxy.port}", job._gateway.record.token)) as client,
    ):
        hosts = client.attach_hosts("workers", 2)
        makers = hosts.spawn_procs(name="made").spawn("makers", Maker)
        takers = hosts.spawn_procs(name="taken").spawn("takers", Taker)
        takers.first_byte.call(makers.make.keep(10)).get(TIMEOUT)
        before = proxy.forwarded
        assert list(takers.first_byte.call(makers.make.keep(3 * MB)).get(TIMEOUT).values()) == [0, 1]
        assert proxy.forwarded - before < 10_000


def test_status_shows_what_processes_keep(job: ProcessJob, makers: Any) -> None:
    made = makers.make.keep(1000)
    made.info(TIMEOUT)

    def kept() -> list[int]:
        return [mesh.kept for session in job.status().sessions for mesh in session.meshes if mesh.name == "made"]

    wait_for(lambda: [size // 1000 for size in kept()] == [4], "the size of the values")

    def by_rank() -> list[dict[int, int]]:
        found = (mesh.kept_by_rank for session in job.status().sessions for mesh in session.meshes if mesh.kept)
        return [{rank: size // 100 for rank, size in each.items()} for each in found]

    wait_for(lambda: by_rank() == [dict.fromkeys(range(4), 10)], "the sizes by rank")
    made.release()
    wait_for(lambda: kept() == [0], "the values to be dropped")


def test_values_of_another_session_are_refused(job: Any, takers: Any) -> None:
    with kt.Client(kt.UrlDialer(job.gateway_url, job._gateway.record.token)) as other:
        theirs = other.attach_hosts("workers", 2).spawn_procs().spawn("theirs", Maker)
        made = theirs.make.keep(10)
        with pytest.raises(InvalidRequestError, match="belongs to another session"):
            takers.first_byte.call(made)
        assert made.get(TIMEOUT).get(1)[0] == 1


@pytest.fixture
def own_job() -> Iterator[ProcessJob]:
    with ProcessJob({"workers": 2}, env={"MESHGATE_KEPT_MEMORY": str(4 * MB)}) as job:
        yield job


def test_the_next_holder_of_a_session_keeps_values_of_its_own(
    own_job: ProcessJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hosts = own_job.state(cached_path=None).workers
    left = hosts.spawn_procs(name="made").spawn("makers", Maker)
    kept, named = left.make.keep(10), left.make.keep(20).named("batch")
    kept.info(TIMEOUT)
    assert counts(left) == {(2, 0)}
    own_job.detach("kept")
    next_job: Any = job_load(str(tmp_path / ".monarch" / "job_state.pkl"))
    try:
        session = next_job.attach()
        makers, batch = session["makers"], session.kept["batch"]
        wait_for(lambda: counts(makers) == {(1, 0)}, "the deliveries to be dropped")
        assert [*session.kept] == ["batch"]
        assert batch.info(TIMEOUT).get(1).bytes == named.info(TIMEOUT).get(1).bytes
        assert [len(each) for each in batch.get(TIMEOUT).values()] == [20, 20]
        assert list(makers.add.call(batch, 1).get(TIMEOUT).values()) == [1, 2]
        batch.release()
        wait_for(lambda: counts(makers) == {(0, 0)}, "the values to be dropped")
        again = makers.make.keep(10)
        assert again._remote.number > kept._remote.number
        assert list(makers.add.call(again, 1).get(TIMEOUT).values()) == [1, 2]
    finally:
        next_job._client.close()
        own_job.kill()


def test_limits_deaths_and_a_server_restart(own_job: ProcessJob) -> None:
    """In one test, because they need a job of their own."""
    hosts = own_job.state(cached_path=None).workers
    makers = hosts.spawn_procs(per_host={"gpus": 1}, name="made").spawn("makers", Maker)
    takers = hosts.spawn_procs(per_host={"gpus": 1}, name="taken").spawn("takers", Taker)
    first, second = makers.make.keep(3 * MB), makers.make.keep(2 * MB)
    with pytest.raises(ActorError, match=r"keeps 3\.1 MB of the 4\.2 MB .*makers\.make\.keep\(\) 3\.1 MB.*release"):
        second.get(TIMEOUT)
    first.info(TIMEOUT)
    first.release()
    kept = makers.make.keep(2 * MB)
    kept.info(TIMEOUT)
    kill_server(own_job)
    assert list(takers.first_byte.call(kept).get(TIMEOUT).values()) == [0, 1]
    makers.slice(hosts=1).die.broadcast()
    wait_for(lambda: isinstance(takers.first_byte.call(kept).exception(TIMEOUT), ValueLostError), "the loss")
    with pytest.raises(
        ValueLostError, match=r"takers\.first_byte could not run: the value of makers\.make\.keep"
    ) as lost:
        takers.first_byte.call(kept).get(TIMEOUT)
    assert (lost.value.ranks, lost.value.call) == ((1,), "makers.make.keep()")
    with pytest.raises(ValueLostError, match="keep"):
        kept.get(TIMEOUT)
    living = kept.slice(hosts=0)
    assert set(takers.first_byte.call(living).get(TIMEOUT).values()) == {0}
    again = makers.slice(hosts=0).make.keep(10)
    assert set(takers.first_byte.call(again).get(TIMEOUT).values()) == {0}


def test_nothing_stays_of_calls_that_do_not_take_their_values(
    makers: Any, hosts: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    procs = hosts.spawn_procs(name="users")
    statistics = procs.spawn("statistics", Maker)
    made = makers.slice(gpus=0).make.keep(10)

    def left() -> set[int]:
        return {deliveries for _, deliveries in counts(statistics)}

    failing = procs.spawn("failing", Unhappy, -1, made)
    assert failing.take.call(made).exception(TIMEOUT) is None
    assert left() == {0}
    for future in failing.take_or_fail.stream(made):
        future.exception(TIMEOUT)
    assert failing.take_or_fail.call(made).exception(TIMEOUT) is not None
    wait_for(lambda: left() == {0}, "the values to be dropped")
    assert procs.spawn("not started", Unhappy, 1, made).take.call(made).exception(TIMEOUT) is not None
    wait_for(lambda: left() == {0}, "the values to be dropped")
    failing.wait.broadcast(1.0)
    failing.fail.broadcast()  # ends the actors, before they take what follows
    failing.take.broadcast(made)
    wait_for(lambda: failing.take.call(made).exception(TIMEOUT), "the failure")
    wait_for(lambda: left() == {0}, "the values to be dropped")


def test_what_uses_kept_values_in_a_dead_or_stopped_process_fails(hosts: Any, procs: Any) -> None:
    holders = procs.slice(gpus=0).spawn("holders", Maker)
    users = hosts.spawn_procs(name="using")
    uses = users.spawn("uses", Maker)
    kept = holders.make.keep(10)
    assert set(uses.is_made_here.call(kept).get(TIMEOUT).values()) == {False}
    uses.slice(hosts=1).die.broadcast()
    wait_for(lambda: uses.kept.call().exception(TIMEOUT), "the failure")
    with pytest.raises(SupervisionError):
        uses.is_made_here.call(kept).get(TIMEOUT)
    with pytest.raises(ValueLostError, match=r"the value of using\.put\(\) on rank 1"):
        users.put(b"x").get(TIMEOUT)
    living = uses.slice(hosts=0)  # whose messages wait for nothing
    assert living.is_made_here.call_one(kept.slice(hosts=0)).get(TIMEOUT) is False


def test_stopping_processes_ends_a_delivery_to_them(hosts: Any) -> None:
    holders = hosts.spawn_procs(name="holding").spawn("holders", Maker)
    users = hosts.spawn_procs(name="using")
    uses = users.spawn("uses", Maker)
    assert set(uses.is_made_here.call(holders.make.keep(10)).get(TIMEOUT).values()) == {False}
    call = uses.is_made_here.call(holders.make_slow.keep(TIMEOUT))
    users.stop().get(TIMEOUT)
    with pytest.raises(MeshgateError):
        call.get(TIMEOUT / 2)
    kept = holders.make.keep(10)
    holders._procs.stop().get(TIMEOUT)
    with pytest.raises(ValueLostError, match=r"holders\.make\.keep\(\) are lost, .* mesh 'holding' was stopped"):
        kept.get(TIMEOUT)


@pytest.fixture(scope="module")
def referrers(takers: Any) -> Any:
    return takers._procs.spawn("referrers", Referrer)


def test_actors_get_references_and_fetch_the_values(makers: Any, referrers: Any, procs: Any) -> None:
    made = makers.make.keep(10)
    one = made.slice(hosts=1, gpus=0)
    assert list(referrers.first_byte.call(made.ref()).get(TIMEOUT).values()) == [0, 1, 2, 3]
    assert set(referrers.first_byte.call(one.ref()).get(TIMEOUT).values()) == {2}
    assert list(
        referrers.slice(hosts=0).first_byte.call(made.slice(gpus=1).rename(hosts="gpus").ref()).get(TIMEOUT).values()
    ) == [1, 3]
    assert referrers.all_first_bytes.call(made.all().ref()).get(TIMEOUT).get(3) == [0, 1, 2, 3]
    assert referrers.first_byte.choose(made.ref()).get(TIMEOUT) in range(4)
    held = procs.spawn("held", Referrer, made.ref())
    assert list(held.first_byte.call().get(TIMEOUT).values()) == [0, 1, 2, 3]
    port = referrers.slice(hosts=0, gpus=0).open.call_one().get(TIMEOUT)
    port.send(one.ref())
    assert referrers.slice(hosts=0, gpus=0).receive.call_one().get(TIMEOUT) == 2
    made.release()  # which ``held`` refers to


def test_an_endpoint_that_is_not_async_fetches_and_the_process_itself_has_the_object(hosts: Any) -> None:
    blocking = hosts.spawn_procs(name="blocking").spawn("blocking", Blocking)
    made = blocking.make.keep(10)
    assert list(blocking.first_byte.call(made.ref()).get(TIMEOUT).values()) == [0, 1]
    assert all(blocking.is_this.call(made.ref()).get(TIMEOUT).values())
    assert set(blocking.first_byte.call(made.slice(hosts=1).ref()).get(TIMEOUT).values()) == {1}
    locks = blocking.make_unpicklable.keep()
    text = r"The value of blocking\.make_unpicklable\.keep\(\) on rank 1 cannot be sent to another process"
    with pytest.raises(ActorError, match=text):
        blocking.slice(hosts=0).first_byte.call_one(locks.slice(hosts=1).ref()).get(TIMEOUT)
    assert counts(blocking) == {(2, 0)}


def test_actors_pass_references_on_and_return_them(makers: Any, referrers: Any) -> None:
    made = makers.make.keep(10)
    others = referrers.slice(hosts=1)  # which do not wait for themselves
    passing = referrers.slice(hosts=0, gpus=0)
    assert passing.pass_on.call_one(made.slice(hosts=1, gpus=1).ref(), others).get(TIMEOUT) == [3, 3]
    returned = referrers.give_back.call(made.ref()).get(TIMEOUT).values()
    del made
    gc.collect()
    assert [each.get(TIMEOUT).item()[0] for each in returned] == [0, 1, 2, 3]
    assert set(makers.add.call(returned[2], 40).get(TIMEOUT).values()) == {42}
    del returned
    gc.collect()
    wait_for(lambda: counts(makers) == {(0, 0)}, "the values to be dropped")


def test_a_value_is_there_until_the_calls_with_references_have_ended_and_not_longer(
    makers: Any, referrers: Any, hosts: Any
) -> None:
    for _ in range(50):
        found = referrers.first_byte.call(makers.make.keep(10).ref())
    assert list(found.get(TIMEOUT).values()) == [0, 1, 2, 3]
    wait_for(lambda: counts(makers) == {(0, 0)}, "the values to be dropped")
    made = makers.slice(gpus=0).make.keep(10)
    held = hosts.spawn_procs().spawn("held", Referrer, made.ref())
    assert list(held.first_byte.call().get(TIMEOUT).values()) == [0, 2]
    assert {
        each["deliveries"] for each in held._procs.spawn("statistics", Maker).kept.call().get(TIMEOUT).values()
    } == {0}
    made.release()
    wait_for(lambda: counts(makers) == {(0, 0)}, "the values to be dropped")
    with pytest.raises(ActorError, match=r"value of makers\.make\.keep\(\) on rank 0: it was released") as raised:
        held.slice(hosts=0).first_byte.call_one().get(TIMEOUT)
    assert isinstance(raised.value.exception, RuntimeError)


def test_a_reference_to_a_value_of_a_process_that_has_died_says_so(hosts: Any, procs: Any) -> None:
    mortal = hosts.spawn_procs(name="mortal").spawn("mortal", Maker)
    made = mortal.make.keep(10)
    held = procs.slice(gpus=0).spawn("held", Referrer, made.ref())
    assert list(held.first_byte.call().get(TIMEOUT).values()) == [0, 1]
    slow = mortal.slice(hosts=1).make_slow.keep(TIMEOUT)  # which takes as long to arrive
    slow.info(TIMEOUT)
    stuck = hosts.slice(hosts=0).spawn_procs(name="stuck")
    there = stuck.spawn("waiting", Referrer)
    assert there.first_byte.call_one(made.slice(hosts=0).ref()).get(TIMEOUT) == 0
    waiting = there.first_byte.call_one(slow.ref())
    mortal.slice(hosts=1).die.broadcast()
    dead = held.slice(hosts=1)
    wait_for(lambda: dead.first_byte.call_one().exception(TIMEOUT), "the failure")
    with pytest.raises(ActorError, match="the process that kept it has ended") as raised:
        dead.first_byte.call_one().get(TIMEOUT)
    lost: Any = raised.value.exception
    assert isinstance(lost, ValueLostError)
    assert (lost.call, lost.ranks) == ("mortal.make.keep()", (1,))
    with pytest.raises((ActorError, ValueLostError)):  # lost before the call is sent, or while the actor fetches it
        waiting.get(TIMEOUT)
    stuck.stop().get(TIMEOUT)
    assert held.slice(hosts=0).first_byte.call_one().get(TIMEOUT) == 0
