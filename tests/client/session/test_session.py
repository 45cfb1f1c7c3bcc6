from __future__ import annotations

import gc
import pickle
import threading
import types
from collections.abc import Sequence
from typing import Any

import pytest

import meshgate
from meshgate.actors.api import MonarchActorError
from meshgate.errors import (
    ActorError,
    GatewayError,
    MeshFailure,
    SpawnFailed,
    StepFailedError,
    SupervisionError,
    UnreadableResult,
)
from meshgate.proxies.client import Client
from meshgate.serialization.unpickling import ReadingRules
from meshgate.session import session as session_module
from meshgate.session.detached import ReadMarks
from meshgate.session.dialing import UrlDialer
from meshgate.session.futures import FutureProxy
from meshgate.session.session import ResultReader
from meshgate.session.settings import ClientSettings
from meshgate.session.transport import connection_thread
from meshgate.session.transport.connection_thread import ConnectionThread
from meshgate_wire import Fragments, Header
from meshgate_wire.messages import (
    Adopted,
    AttachHosts,
    Call,
    Configure,
    Detach,
    Done,
    EndSession,
    ErrorGroup,
    Failure,
    Fault,
    Keeps,
    ObjectFailed,
    Read,
    Release,
    Returned,
    SpawnActors,
    SpawnProcs,
    Stop,
    Values,
)
from tests.client.counting import Counter, counters
from tests.client.scripted_gateway import TOKEN, ScriptedGateway, ScriptedSession
from tests.waiting import Printed, wait_for


@pytest.mark.parametrize("local", [True, False])
def test_errors_of_jobs_on_this_machine_name_this_programs_environment(gateway: ScriptedGateway, local: bool) -> None:
    dialer = UrlDialer(gateway.url, TOKEN, alive=(lambda: True) if local else None)
    with Client.connect(dialer) as client:
        missing = ModuleNotFoundError("No module named 'torch'", name="torch")
        buffer = Fragments((pickle.dumps(ActorError(missing)),))
        failure = Failure(kind="actor", message="", errors=(ErrorGroup(ranks=(0,), count=1, buffer=0),))
        text = str(client.reader.error(failure, [buffer], "trainers.step"))
    assert ("pip install torch" in text, "Compute(image=…)" in text) == (local, not local)


def test_a_chain_of_requests_is_sent_before_any_reply(gateway: ScriptedGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: rank + amount
    gateway.on[AttachHosts] = lambda session, header, _: session.ranks.update({header.object: [0, 1]})  # no reply
    assert counters(client).add.call(10).get(timeout=20).values() == [10, 11, 12, 13]
    kinds = [type(header) for header in gateway.received]
    assert kinds == [AttachHosts, SpawnProcs, SpawnActors, Call]


def test_threads_may_call_concurrently(gateway: ScriptedGateway, client: Client) -> None:
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


def test_a_thousand_calls_are_sent_in_few_messages_and_in_order(gateway: ScriptedGateway, client: Client) -> None:
    one = counters(client).slice(hosts=0, gpus=0)
    one.add.call_one(0).get(timeout=20)
    before = gateway.websocket_messages
    posted = threading.Event()
    client._connection.call_soon(lambda: posted.wait(60))  # how often a busy machine lets it run is not of interest
    try:
        futures = [one.add.call_one(i) for i in range(1000)]
    finally:
        posted.set()
    assert [future.get(timeout=60) for future in futures] == list(range(1000))
    assert gateway.websocket_messages - before < 200


def test_large_arguments_and_results_are_sent_out_of_band(gateway: ScriptedGateway, client: Client) -> None:
    gateway.functions["echo"] = lambda rank, value: bytes(value)
    data = bytearray(b"x" * 20_000_000)
    future = counters(client).slice(hosts=0, gpus=0).echo.call_one(pickle.PickleBuffer(data))
    data[:10] = b"changed..."  # the call has its own copy
    assert future.get(timeout=60) == b"x" * 20_000_000


def test_closing_beside_a_thread_that_keeps_calling_ends_the_session_at_once(
    gateway: ScriptedGateway, settings: ClientSettings
) -> None:
    gateway.functions["echo"] = lambda rank, value: len(value)
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings)
    one = counters(client).slice(hosts=0, gpus=0)
    errors: list[str] = []
    calling = threading.Event()

    def call_until_refused() -> None:
        try:
            while True:
                one.echo.call_one(b"x" * 100_000)
                calling.set()
        except GatewayError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call_until_refused)
    thread.start()
    assert calling.wait(20)
    client.close()
    thread.join(20)
    assert client.closed_cleanly
    assert ["has closed its session" in error for error in errors] == [True]


def test_a_failed_step_fails_its_dependents_with_the_step_named(gateway: ScriptedGateway, client: Client) -> None:
    def fail(session: ScriptedSession, header: SpawnProcs, buffers: Sequence[Fragments]) -> None:
        session.send(ObjectFailed(object=header.object, failure=Failure(kind="supervision", message="no memory")))

    gateway.on[SpawnProcs] = fail
    gateway.on[SpawnActors] = gateway.on[Call] = lambda *_: None
    hosts = client.attach_hosts("workers", 2)
    procs = hosts.spawn_procs(per_host={"gpus": 2}, name="trainers")
    mesh: Any = procs.spawn("counters", Counter)
    with pytest.raises(SupervisionError, match="no memory") as caught:
        mesh.add.call(1).get(timeout=20)
    assert isinstance(caught.value, SpawnFailed)
    assert caught.value.step == "spawn_procs({'gpus': 2}, name='trainers')"
    assert caught.value.failure == caught.value.__cause__.failure
    assert isinstance(caught.value.__cause__, SupervisionError)

    hosts.initialized.get(timeout=20)
    sent = len(gateway.received)
    assert isinstance(mesh.add.call(2).exception(timeout=0), StepFailedError)
    assert isinstance(procs.initialized.exception(timeout=0), StepFailedError)
    assert all(isinstance(future.exception(timeout=0), StepFailedError) for future in mesh.add.stream(1))
    with pytest.raises(StepFailedError):
        mesh.add.broadcast(1)
    hosts.initialized.get(timeout=20)  # the hosts still work
    assert len(gateway.received) == sent + 1


def test_an_actor_fails_with_a_mesh_among_its_arguments(gateway: ScriptedGateway, client: Client) -> None:
    spawn = gateway.on[SpawnActors]

    def fail_first(session: ScriptedSession, header: SpawnActors, buffers: Sequence[Fragments]) -> None:
        if header.name == "broken":
            session.send(ObjectFailed(object=header.object, failure=Failure(kind="invalid", message="no such class")))
        else:
            spawn(session, header, buffers)

    gateway.on[SpawnActors] = fail_first
    gateway.on[Call] = lambda *_: None
    procs = client.attach_hosts("workers", 2).spawn_procs()
    broken = procs.spawn("broken", Counter)
    dependent: Any = procs.spawn("dependent", Counter, broken)
    with pytest.raises(StepFailedError, match="no such class"):
        dependent.add.call(1).get(timeout=20)


def test_calls_on_a_stopped_mesh_fail_at_once_and_are_not_sent(gateway: ScriptedGateway, client: Client) -> None:
    hosts = client.attach_hosts("workers", 2)
    procs = hosts.spawn_procs(name="trainers")
    mesh: Any = procs.spawn("counters", Counter)
    assert procs.stop().get(timeout=20) is None
    assert procs.stop().get(timeout=20) is None
    with pytest.raises(SupervisionError, match="procs mesh 'trainers' was stopped"):
        mesh.add.call(1).get(timeout=0)
    with pytest.raises(RuntimeError, match="`ProcMesh` has already been stopped"):
        procs.spawn("more", Counter)


def released_objects(gateway: ScriptedGateway, client: Client) -> list[int]:
    """The objects that the client has released, in order. Closes the client, so that every release has arrived."""
    gc.collect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_module, "DRAIN_TIMEOUT", 60)
        client.close(60)
    return [number for header in gateway.got(Release) for number in header.objects]


def test_an_unreferenced_stopped_mesh_is_released_on_both_sides(gateway: ScriptedGateway, client: Client) -> None:
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
    assert sorted(released_objects(gateway, client)) == list(range(2, 42))
    for number in stopped:
        sent = [header for header in gateway.received if number in _objects_in(header)]
        assert [type(header) for header in sent] == [SpawnProcs, Stop, Release]


def _objects_in(header: Header) -> tuple[int, ...]:
    if isinstance(header, Release):
        return header.objects
    if isinstance(header, Stop):
        return (header.target.object,)
    return (header.object,) if isinstance(header, SpawnProcs) else ()


def test_an_unreferenced_mesh_is_kept_until_what_it_was_made_from_is_stopped(
    gateway: ScriptedGateway, client: Client
) -> None:
    hosts = client.attach_hosts("workers", 2)
    procs = hosts.spawn_procs()
    procs.spawn("counters", Counter)
    gc.collect()
    assert len(client.objects) == 3
    procs.stop().get(timeout=20)
    assert len(client.objects) == 2
    assert released_objects(gateway, client) == [3]


def test_an_unreferenced_mesh_whose_creation_failed_is_released(gateway: ScriptedGateway, client: Client) -> None:
    gateway.on[SpawnActors] = lambda session, header, _: session.send(
        ObjectFailed(object=header.object, failure=Failure(kind="invalid", message="no"))
    )
    with pytest.raises(StepFailedError):
        counters(client).add.call(1).get(timeout=20)
    gc.collect()
    assert [client.objects.get(number) is None for number in (1, 2, 3)] == [False, False, True]


def test_closing_ends_the_session_at_the_gateway(gateway: ScriptedGateway, settings: ClientSettings) -> None:
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


def test_closing_does_not_wait_for_calls_that_the_gateway_has_no_room_for(
    gateway: ScriptedGateway, settings: ClientSettings
) -> None:
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings)
    spawn = gateway.on[SpawnActors]

    def spawn_busy(session: ScriptedSession, header: SpawnActors, buffers: Sequence[Fragments]) -> None:
        session.wire.manual(header.object)  # the calls keep their credit: it does not suffice for all of them
        spawn(session, header, buffers)

    gateway.on[SpawnActors], gateway.on[Call] = spawn_busy, lambda *_: None
    busy = client.attach_hosts("workers", 2).spawn("counters", Counter)
    calls = [busy.echo.call(b"x" * 100_000) for _ in range(100)]
    client.close()
    assert client.closed_cleanly
    assert len(gateway.got(Call)) < len(calls)
    for waiting in calls:
        with pytest.raises(GatewayError, match="this program has closed its session"):
            waiting.get(timeout=0)


def test_closing_gives_up_if_the_gateway_does_not_reply(gateway: ScriptedGateway) -> None:
    gateway.on[EndSession] = lambda *_: None
    settings = ClientSettings(close_timeout=0.05)
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings)
    client.close()
    assert client.error is not None


def test_closing_does_not_wait_for_a_gateway_that_is_gone(
    gateway: ScriptedGateway, settings: ClientSettings, monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    monkeypatch.setattr(connection_thread, "CLOSING_PATIENCE", 0.2)

    async def gone(dialer: UrlDialer) -> str:
        return "its job has ended"

    monkeypatch.setattr(UrlDialer, "gone", gone)

    def end(session: ScriptedSession, header: EndSession, buffers: Sequence[Fragments]) -> None:
        gateway.refuse = lambda request: (503, {"error": "nothing is here any more"})
        assert session.link is not None
        session.link.transport.abort()

    gateway.on[EndSession] = end
    client = Client.connect(
        UrlDialer(gateway.url, TOKEN), settings=settings.model_copy(update={"close_timeout": 3600, "lost_after": 3600})
    )
    client._connection._outage._quiet = 0.0  # from now on: the first connection may take long
    client.close()
    assert client.error is not None
    assert "calls wait" not in printed.err


def test_closing_does_not_wait_long_for_a_gateway_whose_job_has_no_host_any_more(
    gateway: ScriptedGateway, settings: ClientSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[MeshFailure] = []
    monkeypatch.setattr(meshgate, "unhandled_fault_hook", faults.append)
    gateway.on[EndSession] = lambda *_: None
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings.model_copy(update={"close_timeout": 3600}))
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    fault = Fault(object=None, mesh="workers", ranks=(), report="Slurm ended job 7", job_lost=True)
    gateway.do(lambda: gateway.session().send(fault))
    wait_for(lambda: faults, "the fault")
    client.close()


def test_the_gateway_sends_no_output_if_the_setting_is_off(gateway: ScriptedGateway) -> None:
    with Client.connect(UrlDialer(gateway.url, TOKEN), stream_output=False) as client:
        client.attach_hosts("workers", 2).initialized.get(timeout=20)
    assert gateway.got(Configure)[0].stream_output is False


class NoProxies:
    """Fails on every mesh and port in a result."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


@pytest.fixture
def reader() -> ResultReader:
    return ResultReader(NoProxies(), ReadingRules)  # type: ignore[arg-type]


def pickled(value: object) -> Fragments:
    return Fragments((pickle.dumps(value),))


def test_values_are_unpickled(reader: ResultReader) -> None:
    assert reader.value(pickled([1, 2]), Adopted(), "counters.count") == [1, 2]


def test_the_error_of_an_unreadable_value_names_the_endpoint(reader: ResultReader) -> None:
    with pytest.raises(UnreadableResult, match=r"^counters\.count: ") as caught:
        reader.value(pickled(Unreadable()), Adopted(), "counters.count")
    assert caught.value.endpoint == "counters.count"


def test_errors_are_unpickled(reader: ResultReader) -> None:
    failure = Failure(kind="actor", message="failed", errors=(ErrorGroup(ranks=(0,), count=1, buffer=0),), total=1)
    error = reader.error(failure, [pickled(MonarchActorError(KeyError("x"), "failed"))], "counters.add")
    assert isinstance(error.__cause__, KeyError)
    assert "counters.add failed" in str(error)


def test_an_exception_sent_as_a_message_is_unpickled(reader: ResultReader) -> None:
    assert isinstance(reader.raised(pickled(KeyError("x")), Adopted()).exception, KeyError)


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["callback", "drain", "drain and reply"])
def test_ctrl_c_while_closing_ends_the_session_all_the_same(
    gateway: ScriptedGateway, settings: ClientSettings, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings)
    if step == "callback":
        client.before_close(interrupt)
    else:
        monkeypatch.setattr(client._connection, "drained", interrupt)
    if step == "drain and reply":
        monkeypatch.setattr(FutureProxy, "exception", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.close()
    wait_for(lambda: gateway.got(EndSession), "the end of the session")
    assert client.error is not None
    assert client.closed_cleanly == (step != "drain and reply")


def close_in_thread(client: Client) -> tuple[threading.Thread, threading.Event]:
    """A thread that closes ``client`` and is held up until the event is set."""
    begun, goes_on = threading.Event(), threading.Event()
    client.before_close(lambda: (begun.set(), goes_on.wait(60)))
    thread = threading.Thread(target=client.close, daemon=True)
    thread.start()
    assert begun.wait(60)
    return thread, goes_on


def test_a_close_waits_for_that_of_another_thread(gateway: ScriptedGateway, settings: ClientSettings) -> None:
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings)
    thread, goes_on = close_in_thread(client)
    lock = client._closing

    def acquire(timeout: float) -> bool:
        goes_on.set()  # not before
        return lock.acquire(timeout=timeout)

    client._closing = types.SimpleNamespace(acquire=acquire, release=lock.release)  # type: ignore[assignment]
    client.close(60)
    assert client.closed_cleanly
    assert len(gateway.got(EndSession)) == 1
    thread.join(60)


def test_a_close_that_has_waited_long_enough_for_another_thread_ends_the_session(
    gateway: ScriptedGateway, settings: ClientSettings
) -> None:
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings)
    thread, goes_on = close_in_thread(client)
    client.close(0)
    assert client.error is not None
    goes_on.set()
    thread.join(60)
    wait_for(lambda: gateway.got(EndSession), "the end of the session")


def test_a_callback_of_close_may_close(gateway: ScriptedGateway, settings: ClientSettings) -> None:
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings)
    client.before_close(client.close)  # as a signal handler does that interrupts one
    client.close()
    assert client.closed_cleanly
    assert len(gateway.got(EndSession)) == 1


def test_detaching_sends_results_back_that_were_on_their_way(gateway: ScriptedGateway, client: Client) -> None:
    answer: Any = gateway.on[Call]
    called: list[tuple[Any, Any]] = []
    gateway.on[Call] = lambda _, header, buffers: called.append((header, buffers))
    one = counters(client).slice(hosts=0, gpus=0)
    answered, kept, late = (one.add.call_one(amount) for amount in (1, 2, 3))
    wait_for(lambda: len(called) == 3, "the calls")  # Detach may overtake them
    confirmed: list[Detach] = []

    def detach(session: ScriptedSession, header: Detach, _: object) -> None:
        confirmed.append(header)
        if len(confirmed) == 1:
            answer(session, *called[0])
            session.send(Keeps(calls=(called[1][0].call,)))
        session.send(Done(call=header.call))
        if len(confirmed) == 1:
            answer(session, *called[2])
            answer(session, *called[1])

    gateway.on[Detach] = detach
    client.detach("training").get(timeout=20)
    requests = [header for header, _ in called]
    assert [(header.request, header.reply) for header in gateway.got(Returned)] == [
        (request, Values(call=request.call)) for request in (requests[0], requests[2])
    ]
    assert gateway.received[-1] is confirmed[1]
    assert [future.get(timeout=20) for future in (answered, kept, late)] == [1, 2, 3]
    client.detach("training").get(timeout=20)
    assert len(gateway.got(Returned)) == 2


def test_detaching_takes_one_message_if_nothing_is_on_its_way(gateway: ScriptedGateway, client: Client) -> None:
    gateway.on[Detach] = lambda session, header, _: session.send(Done(call=header.call))
    for _ in range(2):
        client.detach("training").get(timeout=20)
    assert len(gateway.got(Detach)) == 2
    assert not list(client.calls)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, GatewayError])
def test_after_an_interruption_while_detach_is_posted_the_next_one_is_the_first(
    gateway: ScriptedGateway, client: Client, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    gateway.on[Detach] = lambda session, header, _: session.send(Done(call=header.call))
    post = ConnectionThread.post

    def interrupted(self: ConnectionThread, header: Header, *args: Any, **kwargs: Any) -> None:
        if isinstance(header, Detach):
            raise interruption
        post(self, header, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ConnectionThread, "post", interrupted)
        with pytest.raises(interruption):
            client.detach("training")
    assert not list(client.calls)
    assert (client._dispatcher.marks, client._dispatcher.returns) == (None, None)
    assert not client.detached
    client.detach("training").get(timeout=20)
    assert client._dispatcher.marks is not None
    assert not list(client.calls)
    with monkeypatch.context() as patch:
        patch.setattr(ConnectionThread, "post", interrupted)
        with pytest.raises(interruption):
            client.detach("other")
    assert client.detached == "training"
    assert client._dispatcher.marks is not None


def test_the_gateway_notes_that_a_session_is_detached_before_results_have_been_sent_back(
    gateway: ScriptedGateway, client: Client
) -> None:
    gateway.on[Call] = lambda *_: None
    gateway.on[Detach] = lambda session, header, _: session.send(Done(call=header.call))
    call = counters(client).slice(hosts=0, gpus=0).add.call_one(1)
    for _ in range(2):
        noted, returned = client.start_detaching("training")
        noted.get(timeout=20)
        assert not returned.done()
    assert not call.done()


def test_a_session_that_ends_while_results_are_on_their_way_ends_the_wait_of_detach(
    gateway: ScriptedGateway, settings: ClientSettings, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings)
    gateway.on[Call] = lambda *_: None
    gateway.on[Detach] = lambda session, header, _: session.send(Done(call=header.call))
    call = counters(client).slice(hosts=0, gpus=0).add.call_one(1)
    detached = client.detach("training")
    wait_for(lambda: client._dispatcher.returns is not None and client._dispatcher.returns._awaited, "Done")
    client.close()
    for future in (call, detached):
        assert isinstance(future.exception(timeout=20), GatewayError)
    assert not caplog.records


def test_leaving_takes_what_was_read_on_the_connection_thread_as_always(
    gateway: ScriptedGateway, settings: ClientSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.on[Detach] = lambda session, header, _: session.send(Done(call=header.call))
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings)
    threads: set[threading.Thread] = set()
    take = ReadMarks.take

    def recorded(marks: ReadMarks) -> Read | None:
        threads.add(threading.current_thread())
        return take(marks)

    monkeypatch.setattr(ReadMarks, "take", recorded)
    client.detach("training").get(timeout=20)
    call = counters(client).slice(hosts=0, gpus=0).add.call_one(1)
    assert call.get(timeout=20) == 1
    client.leave()
    assert threads == {client._connection._thread}
    assert [len(header.calls) for header in gateway.got(Read)] == [1]
