from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from meshgate.client import Client, current_client, use_client
from meshgate.dialing import UrlDialer
from meshgate.errors import (
    ActorError,
    GatewayError,
    GatewayFault,
    InvalidRequestError,
    StepFailedError,
    SupervisionError,
)
from meshgate.extent import Extent
from meshgate.proxies import ActorMeshProxy, HostMeshProxy
from meshgate.settings import ClientSettings
from meshgate_wire import Fragments, Header
from meshgate_wire.messages import (
    AttachHosts,
    Call,
    Configure,
    Done,
    EndSession,
    ErrorGroup,
    Failed,
    Failure,
    Fault,
    Host,
    ObjectFailed,
    Output,
    OutputLine,
    Release,
    SpawnActors,
    SpawnProcs,
    Stop,
    Values,
    stream_of,
)
from tests.client.counting import Counter
from tests.client.fake_gateway import TOKEN, FakeGateway, FakeSession


def counters(client: Client, **per_host: int) -> Any:
    hosts = client.attach_hosts("workers", 2)
    return hosts.spawn_procs(per_host=per_host or {"gpus": 2}).spawn("counters", Counter)


def test_the_chain_is_on_the_wire_before_any_answer(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: rank + amount
    gateway.on[AttachHosts] = lambda session, header, _: session.ranks.update({header.object: [0, 1]})  # no answer
    assert counters(client).add.call(10).get(timeout=20).values() == [10, 11, 12, 13]
    kinds = [type(header) for header in gateway.received]
    assert kinds == [AttachHosts, SpawnProcs, SpawnActors, Call]


def test_call_gives_a_value_mesh_of_the_mesh_shape(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: rank * amount
    values = counters(client).add.call(2).get(timeout=20)
    assert values.extent == Extent(["hosts", "gpus"], [2, 2])
    assert values.item(hosts=1, gpus=0) == 4
    assert repr(values).startswith("ValueMesh({hosts: 2, gpus: 2})")


def test_a_slice_calls_exactly_its_ranks(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: (rank, amount)
    mesh = counters(client)
    assert mesh.slice(gpus=1).add.call(5).get(timeout=20).values() == [(1, 5), (3, 5)]
    assert mesh.slice(hosts=1, gpus=0).add.call_one(6).get(timeout=20) == (2, 6)
    assert mesh.flatten("all").slice(all=slice(1, 3)).add.call(0).get(timeout=20).values() == [(1, 0), (2, 0)]


def test_keyword_arguments_travel(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount, *, twice: (amount, twice)
    assert counters(client).slice(hosts=0, gpus=0).add.call_one(amount=3, twice=True).get(timeout=20) == (3, True)


def test_choose_asks_one(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: rank
    assert counters(client).add.choose(1).get(timeout=20) == 0
    assert gateway.got(Call)[-1].adverb == "choose"


def test_stream_gives_a_future_a_rank(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: rank + amount
    assert [future.get(timeout=20) for future in counters(client).add.stream(1)] == [1, 2, 3, 4]


def test_stream_tells_each_failure_apart(gateway: FakeGateway, client: Client) -> None:
    def answer(session: FakeSession, header: Call, buffers: Sequence[Fragments]) -> None:
        failure = Failure(kind="supervision", message="it died", ranks=(2,))
        session.send(Failed(call=header.call, rank=2, failure=failure), stream=stream_of(header.target.object))
        session.send(Failed(call=header.call, failure=failure), stream=stream_of(header.target.object))

    gateway.on[Call] = answer
    errors = [future.exception(timeout=20) for future in counters(client).add.stream(1)]
    assert [type(error) for error in errors] == [SupervisionError] * 4


def test_broadcast_waits_for_nothing(gateway: FakeGateway, client: Client) -> None:
    mesh = counters(client)
    assert mesh.add.broadcast(1) is None
    mesh.initialized.get(timeout=20)
    assert gateway.got(Call)[-1].adverb == "broadcast"


def test_await_works_on_any_loop(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: amount
    one = counters(client).slice(hosts=0, gpus=0)

    async def main() -> list[int]:
        return list(await asyncio.gather(*(one.add.call_one(i) for i in range(50))))

    assert asyncio.run(main()) == asyncio.run(main()) == list(range(50))


def test_threads_may_call_at_once(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: amount
    one = counters(client).slice(hosts=0, gpus=0)
    results: dict[int, list[int]] = {}

    def work(base: int) -> None:
        results[base] = [one.add.call_one(base + i).get(timeout=30) for i in range(50)]

    threads = [threading.Thread(target=work, args=(base,)) for base in range(0, 800, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {base: list(range(base, base + 50)) for base in range(0, 800, 100)}


def test_a_thousand_calls_leave_in_few_messages_and_in_order(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: amount
    one = counters(client).slice(hosts=0, gpus=0)
    one.add.call_one(0).get(timeout=20)
    before = gateway.websocket_messages
    futures = [one.add.call_one(i) for i in range(1000)]
    assert [future.get(timeout=60) for future in futures] == list(range(1000))
    assert gateway.websocket_messages - before < 200


def test_large_arguments_and_results_travel_beside_their_pickle(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["echo"] = lambda rank, value: bytes(value)
    data = bytearray(b"x" * 20_000_000)
    future = counters(client).slice(hosts=0, gpus=0).echo.call_one(pickle.PickleBuffer(data))
    data[:10] = b"changed..."  # the call has its own copy
    assert future.get(timeout=60) == b"x" * 20_000_000


# --- failures ---------------------------------------------------------------------------------------------


def test_a_remote_error_comes_with_rank_host_and_traceback(gateway: FakeGateway, client: Client) -> None:
    def answer(session: FakeSession, header: Call, buffers: Sequence[Fragments]) -> None:
        failure = Failure(
            kind="actor",
            message="Actor call counters.add failed.",
            mesh="counters",
            ranks=(1,),
            hosts={1: "workers-0"},
            errors=(ErrorGroup(ranks=(1,), count=1, buffer=0),),
            total=4,
        )
        error = pickle.dumps(ZeroDivisionError("division by zero"))
        session.send(Failed(call=header.call, failure=failure), error, stream=stream_of(header.target.object))

    gateway.on[Call] = answer
    future = counters(client).add.call(1)
    with pytest.raises(ActorError, match=r"counters.add failed on rank 1 \(workers-0\)") as caught:
        future.get(timeout=20)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (caught.value.rank, caught.value.host) == (1, "workers-0")


def test_a_failed_step_fails_what_depends_on_it_and_is_named(gateway: FakeGateway, client: Client) -> None:
    def refuse(session: FakeSession, header: SpawnProcs, buffers: Sequence[Fragments]) -> None:
        session.send(ObjectFailed(object=header.object, failure=Failure(kind="supervision", message="no memory")))

    gateway.on[SpawnProcs] = refuse
    gateway.on[SpawnActors] = gateway.on[Call] = lambda *_: None
    hosts = client.attach_hosts("workers", 2)
    procs = hosts.spawn_procs(per_host={"gpus": 2}, name="trainers")
    mesh: Any = procs.spawn("counters", Counter)
    with pytest.raises(StepFailedError, match="no memory") as caught:
        mesh.add.call(1).get(timeout=20)
    assert caught.value.step == "spawn_procs({'gpus': 2}, name='trainers')"
    assert isinstance(caught.value.__cause__, SupervisionError)

    hosts.initialized.get(timeout=20)
    sent = len(gateway.received)
    assert isinstance(mesh.add.call(2).exception(timeout=0), StepFailedError)
    assert isinstance(procs.initialized.exception(timeout=0), StepFailedError)
    assert all(isinstance(future.exception(timeout=0), StepFailedError) for future in mesh.add.stream(1))
    with pytest.raises(StepFailedError):
        mesh.add.broadcast(1)
    hosts.initialized.get(timeout=20)  # the hosts are as good as before
    assert len(gateway.received) == sent + 1


def test_an_actor_that_was_given_a_failed_mesh_fails_with_it(gateway: FakeGateway, client: Client) -> None:
    spawn = gateway.on[SpawnActors]

    def refuse_first(session: FakeSession, header: SpawnActors, buffers: Sequence[Fragments]) -> None:
        if header.name == "broken":
            session.send(ObjectFailed(object=header.object, failure=Failure(kind="invalid", message="no such class")))
        else:
            spawn(session, header, buffers)

    gateway.on[SpawnActors] = refuse_first
    gateway.on[Call] = lambda *_: None
    procs = client.attach_hosts("workers", 2).spawn_procs()
    broken = procs.spawn("broken", Counter)
    dependent: Any = procs.spawn("dependent", Counter, broken)
    with pytest.raises(StepFailedError, match="no such class"):
        dependent.add.call(1).get(timeout=20)


def test_answers_to_calls_nobody_waits_for_are_ignored(gateway: FakeGateway, client: Client) -> None:
    hosts = client.attach_hosts("workers", 2)
    hosts.initialized.get(timeout=20)
    session = gateway.session()
    gateway.do(lambda: session.send(Values(call=4711), b""))
    gateway.do(lambda: session.send(Failed(call=4711, failure=Failure(kind="internal", message=""))))
    gateway.do(lambda: session.send(Done(call=4711)))
    gateway.do(lambda: session.send(Configure()))
    hosts.initialized.get(timeout=20)


def test_an_answer_of_the_wrong_kind_fails_its_call_alone(
    gateway: FakeGateway, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.on[Call] = lambda session, header, _: session.send(Values(call=header.call))
    mesh = counters(client)
    with pytest.raises(GatewayFault, match="makes no sense here"):
        mesh.slice(hosts=0, gpus=0).add.call_one(1).get(timeout=20)
    mesh.initialized.get(timeout=20)


def test_a_message_that_is_too_large_fails_its_call_alone(gateway: FakeGateway, client: Client) -> None:
    mesh = counters(client)
    mesh.initialized.get(timeout=20)
    many = [b"x" * 5000] * 1
    buffers = [pickle.PickleBuffer(bytes(5000)) for _ in range(70_000)]
    with pytest.raises(InvalidRequestError, match="a number of buffers"):
        mesh.echo.call([many, buffers]).get(timeout=60)
    mesh.initialized.get(timeout=20)


# --- stopping ---------------------------------------------------------------------------------------------


def test_calls_on_a_stopped_mesh_fail_here_and_at_once(gateway: FakeGateway, client: Client) -> None:
    hosts = client.attach_hosts("workers", 2)
    procs = hosts.spawn_procs(name="trainers")
    mesh: Any = procs.spawn("counters", Counter)
    assert procs.stop().get(timeout=20) is None
    assert procs.stop().get(timeout=20) is None
    with pytest.raises(SupervisionError, match="procs mesh 'trainers' was stopped"):
        mesh.add.call(1).get(timeout=0)
    with pytest.raises(RuntimeError, match="`ProcMesh` has already been stopped"):
        procs.spawn("more", Counter)


def released(gateway: FakeGateway, client: Client) -> list[int]:
    """What the gateway was told to let go, in order; ends the session, so that all has arrived."""
    gc.collect()
    client.close()
    return [number for header in gateway.got(Release) for number in header.objects]


def test_a_stopped_mesh_that_nobody_holds_is_let_go_on_both_sides(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: rank
    hosts = client.attach_hosts("workers", 2)
    for _ in range(20):
        procs = hosts.spawn_procs()
        mesh: Any = procs.spawn("counters", Counter)
        mesh.add.call(1).get(timeout=20)
        procs.stop()
        del procs, mesh
    gc.collect()
    assert len(client.objects) == 1
    stopped = [header.target.object for header in gateway.received if isinstance(header, Stop)]
    gone = released(gateway, client)
    assert sorted(gone) == list(range(2, 42))
    for number in stopped:
        told = [header for header in gateway.received if number in _names(header)]
        assert [type(header) for header in told] == [SpawnProcs, Stop, Release]


def _names(header: Header) -> tuple[int, ...]:
    if isinstance(header, Release):
        return header.objects
    if isinstance(header, Stop):
        return (header.target.object,)
    return (header.object,) if isinstance(header, SpawnProcs) else ()


def test_a_mesh_that_works_is_kept_though_nobody_holds_it_until_what_it_stands_on_is_stopped(
    gateway: FakeGateway, client: Client
) -> None:
    hosts = client.attach_hosts("workers", 2)
    procs = hosts.spawn_procs()
    procs.spawn("counters", Counter)
    gc.collect()
    assert len(client.objects) == 3
    procs.stop().get(timeout=20)
    assert len(client.objects) == 2
    assert released(gateway, client) == [3]


def test_a_mesh_whose_creation_failed_is_let_go(gateway: FakeGateway, client: Client) -> None:
    gateway.on[SpawnActors] = lambda session, header, _: session.send(
        ObjectFailed(object=header.object, failure=Failure(kind="invalid", message="no"))
    )
    with pytest.raises(StepFailedError):
        counters(client).add.call(1).get(timeout=20)
    gc.collect()
    assert [client.objects.get(number) is None for number in (1, 2, 3)] == [False, False, True]


def test_a_part_of_a_mesh_cannot_be_stopped_and_stays_usable(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: rank
    procs = client.attach_hosts("workers", 2).spawn_procs()
    mesh: Any = procs.spawn("counters", Counter)
    with pytest.raises(NotImplementedError, match="requires an owned ActorMesh"):
        mesh.slice(hosts=0).stop().get(timeout=0)
    with pytest.raises(ValueError, match="must be stopped by an owner"):
        procs.slice(hosts=0).stop().get(timeout=0)
    assert mesh.add.call(1).get(timeout=20).values() == [0, 1]


def test_hosts_that_were_shut_down_take_no_more_processes(client: Client) -> None:
    hosts = client.attach_hosts("workers", 2)
    with pytest.raises(RuntimeError, match="it is a part of a host mesh"):
        hosts.slice(hosts=0).shutdown()
    hosts.shutdown().get(timeout=20)
    for use in (hosts.spawn_procs, hosts.shutdown, hosts.stop):
        with pytest.raises(RuntimeError, match="HostMesh has already been shut down"):
            use()


def test_meshes_are_async_context_managers(gateway: FakeGateway, client: Client) -> None:
    async def main() -> tuple[Any, Any]:
        async with client.attach_hosts("workers", 2) as hosts:
            async with hosts.spawn_procs() as procs, procs:
                await procs.initialized
            with pytest.raises(RuntimeError, match="already been stopped"):
                async with procs:
                    pass
        return hosts, procs

    hosts, _ = asyncio.run(main())
    with pytest.raises(RuntimeError, match="already been shut down"):
        hosts.spawn_procs()


# --- the session ------------------------------------------------------------------------------------------


def test_closing_ends_the_session_in_order(gateway: FakeGateway, settings: ClientSettings) -> None:
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings)
    hosts = client.attach_hosts("workers", 2)
    gateway.on[Call] = lambda *_: None
    waiting = hosts.spawn("counters", Counter).add.call(1)
    client.close()
    client.close()
    assert client.closed
    assert type(gateway.received[-1]) is EndSession
    with pytest.raises(GatewayError, match="this program has closed its session"):
        waiting.get(timeout=0)
    with pytest.raises(GatewayError, match="this program has closed its session"):
        hosts.spawn_procs()


def test_closing_is_bounded_when_the_gateway_does_not_answer(gateway: FakeGateway) -> None:
    gateway.on[EndSession] = lambda *_: None
    settings = ClientSettings(close_timeout=0.05)
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings)
    client.close()
    assert client.error is not None


def test_output_is_off_where_the_setting_says_so(gateway: FakeGateway) -> None:
    with Client.connect(UrlDialer(gateway.url, TOKEN), stream_output=False) as client:
        client.attach_hosts("workers", 2).initialized.get(timeout=20)
    assert gateway.got(Configure)[0].stream_output is False


def test_output_of_actors_is_printed_with_its_label(
    gateway: FakeGateway, settings: ClientSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings) as client:
        hosts = client.attach_hosts("workers", 2)
        hosts.initialized.get(timeout=20)
        session = gateway.session()
        lines = tuple(
            OutputLine(stream="stdout", mesh="counters", ranks=(rank,), host="workers-0", text="hello")
            for rank in range(2)
        )
        gateway.do(lambda: session.send(Output(lines=lines)))
        hosts.initialized.get(timeout=20)
    assert capsys.readouterr().out == "[workers-0 counters 2 ranks] hello\n"


def test_logging_option_hides_what_a_mesh_prints(
    gateway: FakeGateway, settings: ClientSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings) as client:
        hosts = client.attach_hosts("workers", 2)
        loud, quiet = hosts.spawn_procs(name="loud"), hosts.spawn_procs(name="quiet")
        quiet.spawn("whisperers", Counter)
        asyncio.run(quiet.logging_option(stream_to_client=False))
        asyncio.run(loud.logging_option(stream_to_client=True))
        with pytest.raises(ValueError, match="stream_to_client=True"):
            asyncio.run(loud.logging_option(aggregate_window_sec=3))
        session = gateway.session()
        lines = tuple(OutputLine(stream="stdout", mesh=mesh, text=mesh) for mesh in ("loud", "quiet", "whisperers"))
        gateway.do(lambda: session.send(Output(lines=lines)))
        hosts.initialized.get(timeout=20)
    assert capsys.readouterr().out == "[loud] loud\n"


def test_faults_reach_the_hook_of_the_moment(
    gateway: FakeGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    told = threading.Event()
    failures: list[Any] = []
    monkeypatch.setattr("meshgate.unhandled_fault_hook", lambda failure: (failures.append(failure), told.set()))
    fault = Fault(object=3, mesh="counters", ranks=(1,), hosts={1: "workers-1"}, report="killed by signal 9")
    session = gateway.session()
    gateway.do(lambda: session.send(fault))
    assert told.wait(20)
    assert failures[0].mesh_name == "counters"
    assert failures[0].ranks == (1,)
    assert failures[0].report() == "killed by signal 9"


def test_the_default_hook_says_who_died_and_what_can_be_done(
    gateway: FakeGateway, settings: ClientSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings) as client:
        client.attach_hosts("workers", 2).initialized.get(timeout=20)
        session = gateway.session()
        fault = Fault(object=3, mesh="counters", ranks=(1,), hosts={1: "workers-1"}, report="killed by signal 9")
        gateway.do(lambda: session.send(fault))
        client.attach_hosts("workers", 2).initialized.get(timeout=20)
    told = capsys.readouterr().err
    assert "rank 1 of mesh 'counters' on workers-1 failed: killed by signal 9" in told
    assert "unhandled_fault_hook" in told


def test_the_current_client_is_the_last_one_open(gateway: FakeGateway, settings: ClientSettings) -> None:
    dialer = UrlDialer(gateway.url, TOKEN)
    with Client.connect(dialer, settings=settings) as first:
        with Client.connect(dialer, settings=settings) as second:
            assert current_client() is second
            with use_client(first):
                assert current_client() is first
        assert current_client() is first
    with pytest.raises(GatewayError, match="there is no session"):
        current_client()


def test_hosts_know_their_names(gateway: FakeGateway, client: Client) -> None:
    hosts = client.attach_hosts("workers", 2)
    hosts.initialized.get(timeout=20)
    assert isinstance(hosts, HostMeshProxy)
    assert client.objects.hosts_of(hosts._object) == (Host(name="workers-0"), Host(name="workers-1"))


def test_a_mesh_of_another_size_than_the_job_says_is_told(gateway: FakeGateway, client: Client) -> None:
    gateway.on[Call] = lambda *_: None
    mesh: Any = client.attach_hosts("workers", 3).spawn("counters", Counter)
    with pytest.raises(StepFailedError, match="mesh 'workers' has 2 hosts, the job says 3"):
        mesh.add.call(1).get(timeout=20)


def test_a_call_can_be_made_on_a_mesh_that_was_made_from_a_slice(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: rank
    hosts = client.attach_hosts("workers", 2)
    mesh = hosts.slice(hosts=1).spawn_procs(per_host={"gpus": 3}).spawn("counters", Counter)
    assert isinstance(mesh, ActorMeshProxy)
    assert mesh.add.call(1).get(timeout=20).values() == [0, 1, 2]
    assert gateway.got(SpawnProcs)[-1].hosts.region is not None
