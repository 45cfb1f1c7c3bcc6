from __future__ import annotations

import gc
import io
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import pytest

from meshgate.actors.api import MonarchActorError
from meshgate.errors import (
    ActorError,
    BootstrapFailed,
    EngineDiedError,
    GatewayError,
    GatewayFault,
    InvalidRequestError,
    SpawnFailed,
    StepFailedError,
)
from meshgate.proxies import HostMeshProxy
from meshgate.proxies.client import Channel, Client
from meshgate.proxies.endpoints import send
from meshgate.proxies.ports import Port
from meshgate.session.dialing import UrlDialer
from meshgate.session.dispatch import Dispatcher
from meshgate.session.objects import ObjectTable
from meshgate.session.pending_calls import PendingCalls, PendingValue
from meshgate.session.settings import ClientSettings
from meshgate_wire import Fragments, Limits
from meshgate_wire.messages import (
    Attached,
    AttachHosts,
    Call,
    Configure,
    Detach,
    Done,
    ErrorGroup,
    Failed,
    Failure,
    Fault,
    Host,
    HostsAttached,
    ObjectFailed,
    Output,
    OutputLine,
    Stop,
    Values,
    stream_of,
)
from tests.client.counting import Counter, counters
from tests.client.scripted_gateway import TOKEN, ScriptedGateway, ScriptedSession
from tests.waiting import wait_for


def test_replies_to_unknown_calls_are_ignored(gateway: ScriptedGateway, client: Client) -> None:
    hosts = client.attach_hosts("workers", 2)
    hosts.initialized.get(timeout=20)
    session = gateway.session()
    gateway.do(lambda: session.send(Values(call=4711), b""))
    gateway.do(lambda: session.send(Failed(call=4711, failure=Failure(kind="internal", message=""))))
    gateway.do(lambda: session.send(Done(call=4711)))
    gateway.do(lambda: session.send(Configure()))
    hosts.initialized.get(timeout=20)


def test_an_invalid_reply_fails_only_its_call(
    gateway: ScriptedGateway, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.on[Call] = lambda session, header, _: session.send(Values(call=header.call))
    mesh = counters(client)
    with pytest.raises(GatewayFault, match="invalid reply from the gateway"):
        mesh.slice(hosts=0, gpus=0).add.call_one(1).get(timeout=20)
    mesh.initialized.get(timeout=20)


def lower_limit(client: Client) -> None:
    """From now on, the gateway takes messages of up to 64 KiB."""
    client._connection._session.allowed = Limits(max_message=1 << 16)


TOO_LARGE = bytes(70_000)


@pytest.mark.parametrize(
    ("post", "named"),
    [
        (lambda mesh, port: mesh.echo.call(TOO_LARGE), "echo"),
        (lambda mesh, port: next(mesh.echo.stream(TOO_LARGE)), "echo"),
        (lambda mesh, port: mesh.echo.keep(TOO_LARGE), "echo"),
        (lambda mesh, port: mesh.echo.broadcast(TOO_LARGE), "echo"),
        (lambda mesh, port: send(mesh.echo, (TOO_LARGE,), {}, port), "echo"),
        (lambda mesh, port: mesh.put(TOO_LARGE), "PutValue"),
        (lambda mesh, port: port.send(TOO_LARGE), "PortSend"),
        (lambda mesh, port: mesh._procs.spawn("other", Counter, TOO_LARGE), "SpawnActors"),
    ],
    ids=["call", "stream", "keep", "broadcast", "send", "put", "port", "spawn"],
)
def test_what_is_too_large_raises_where_it_is_sent_and_leaves_nothing(
    gateway: ScriptedGateway, client: Client, post: Callable[[Any, Port[Any]], object], named: str
) -> None:
    mesh = counters(client)
    port, _receiver = Channel.open(client=client)
    mesh.initialized.get(timeout=20)
    objects = len(client.objects)
    lower_limit(client)
    message = f"^{named} was not sent: cannot send a message with 7[0-9]{{4}} bytes: the peer's limit is 65536"
    with pytest.raises(InvalidRequestError, match=message):
        post(mesh, port)
    gc.collect()
    assert len(client.objects) == objects
    assert not list(client.calls)
    mesh.initialized.get(timeout=20)
    assert not gateway.got(Call)


def test_a_result_that_cannot_be_sent_back_is_named_in_a_line(
    gateway: ScriptedGateway, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[tuple[Any, Any]] = []
    answer: Any = gateway.on[Call]
    gateway.on[Call] = lambda _, header, buffers: called.append((header, buffers))
    gateway.functions["echo"] = lambda rank, value: TOO_LARGE
    call = counters(client).slice(hosts=0, gpus=0).echo.call_one(1)
    wait_for(lambda: called, "the call")

    def detach(session: ScriptedSession, header: Detach, _: object) -> None:
        if called:
            answer(session, *called.pop())
        session.send(Done(call=header.call))

    gateway.on[Detach] = detach
    lower_limit(client)
    client.detach("training").get(timeout=20)
    assert call.get(timeout=20) == TOO_LARGE
    client.close()  # waits until all is printed
    line = "a result of echo is not kept for the next program: Returned was not sent: cannot send a message with 70"
    assert line in capsys.readouterr().err


def test_a_remote_error_has_rank_host_and_exception(gateway: ScriptedGateway, client: Client) -> None:
    def answer(session: ScriptedSession, header: Call, buffers: Sequence[Fragments]) -> None:
        failure = Failure(
            kind="actor",
            message="Actor call counters.add failed.",
            mesh="counters",
            ranks=(1,),
            hosts={1: "workers-0"},
            errors=(ErrorGroup(ranks=(1,), count=1, buffer=0),),
            total=4,
        )
        error = pickle.dumps(MonarchActorError(ZeroDivisionError("division by zero"), "failed"))
        session.send(Failed(call=header.call, failure=failure), error, stream=stream_of(header.target.object))

    gateway.on[Call] = answer
    future = counters(client).add.call(1)
    with pytest.raises(ActorError, match=r"Actor call counters.add failed on rank 1 \(workers-0\)") as caught:
        future.get(timeout=20)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (caught.value.rank, caught.value.host) == (1, "workers-0")


def test_a_host_mesh_of_another_size_than_the_jobs_fails(gateway: ScriptedGateway, client: Client) -> None:
    gateway.on[Call] = lambda *_: None
    mesh: Any = client.attach_hosts("workers", 3).spawn("counters", Counter)
    with pytest.raises(StepFailedError, match=r"has 2 hosts, but the job has 3 .* call job\.apply\(\), then"):
        mesh.add.call(1).get(timeout=20)


@pytest.mark.parametrize("kind", ["actor", "supervision"])
def test_a_mesh_that_could_not_be_created_fails_requests_with_one_error_whenever_they_are_sent(
    gateway: ScriptedGateway, client: Client, kind: Literal["actor", "supervision"]
) -> None:
    failure = Failure(kind=kind, message="Traceback:\nValueError: no device", step="spawn_procs({})", mesh="procs")
    because_of_it = failure.model_copy(update={"kind": "step"})
    requests: list[Any] = []
    for request in (Call, Stop):
        gateway.on[request] = lambda _, header, __: requests.append(header)

    def refuse(header: Any) -> None:
        session = gateway.session()
        session.send(Failed(call=header.call, failure=because_of_it), stream=stream_of(header.target.object))

    def errors(mesh: Any, procs: Any, between: Callable[[], object] = lambda: None) -> list[tuple[type, type, str]]:
        futures = [mesh.add.call(1), mesh.stop(), procs.stop()]
        between()
        raised = [future.exception(timeout=20) for future in futures]
        return [(type(error), type(getattr(error, "__cause__", None)), str(error)) for error in raised]

    hosts = client.attach_hosts("workers", 2)
    procs = hosts.spawn_procs(name="procs")
    mesh: Any = procs.spawn("counters", Counter)

    def fail() -> None:
        wait_for(lambda: len(requests) == 3, "the requests")
        gateway.do(lambda: gateway.session().send(ObjectFailed(object=procs._object, failure=failure)))

    in_flight = errors(mesh, procs, fail)
    gateway.on[Stop] = lambda _, header, __: refuse(header)
    assert errors(mesh, procs) == in_flight
    later = PendingValue(mesh._object, "counters.add")  # sent by a thread when the failure had yet to arrive
    hosts._client.calls.add(later)
    gateway.do(lambda: refuse(requests[0].model_copy(update={"call": later.number})))
    error = later.future.exception(timeout=20)
    assert (type(error), type(error.__cause__), str(error)) == in_flight[0]
    assert issubclass(in_flight[0][0], BootstrapFailed if kind == "actor" else SpawnFailed)
    assert issubclass(in_flight[2][0], ActorError if kind == "actor" else type(None))  # lost: nothing is left to stop
    assert all("was stopped" not in text for *_, text in in_flight)


def test_output_of_actors_is_printed_with_its_label(
    gateway: ScriptedGateway, settings: ClientSettings, capsys: pytest.CaptureFixture[str]
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


def test_faults_reach_the_current_hook(
    gateway: ScriptedGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    called = threading.Event()
    failures: list[Any] = []
    monkeypatch.setattr("meshgate.unhandled_fault_hook", lambda failure: (failures.append(failure), called.set()))
    fault = Fault(object=3, mesh="counters", ranks=(1,), hosts={1: "workers-1"}, report="killed by signal 9")
    session = gateway.session()
    gateway.do(lambda: session.send(fault))
    assert called.wait(20)
    assert failures[0].mesh_name == "counters"
    assert failures[0].ranks == (1,)
    assert failures[0].report() == "killed by signal 9"


def test_faults_that_another_part_reports_do_not_reach_the_hook(
    gateway: ScriptedGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    called = threading.Event()
    failures: list[Any] = []
    monkeypatch.setattr("meshgate.unhandled_fault_hook", lambda failure: (failures.append(failure), called.set()))
    client.handle_faults(3)
    session = gateway.session()
    for mesh in (3, 4):
        fault = Fault(object=mesh, mesh=f"mesh {mesh}", ranks=(1,), report="killed by signal 9")
        gateway.do(lambda fault=fault: session.send(fault))
    assert called.wait(20)
    assert [failure.mesh_name for failure in failures] == ["mesh 4"]


def test_the_default_hook_prints_the_failure_and_a_hint(
    gateway: ScriptedGateway, settings: ClientSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings) as client:
        client.attach_hosts("workers", 2).initialized.get(timeout=20)
        session = gateway.session()
        fault = Fault(object=3, mesh="counters", ranks=(1,), hosts={1: "workers-1"}, report="killed by signal 9")
        gateway.do(lambda: session.send(fault))
        client.attach_hosts("workers", 2).initialized.get(timeout=20)
    printed = capsys.readouterr().err
    assert "rank 1 of mesh 'counters' on workers-1 failed: killed by signal 9" in printed
    assert "unhandled_fault_hook" in printed


def test_host_names_are_recorded(gateway: ScriptedGateway, client: Client) -> None:
    hosts = client.attach_hosts("workers", 2)
    hosts.initialized.get(timeout=20)
    assert isinstance(hosts, HostMeshProxy)
    assert hosts._owned.remote.hosts == (Host(name="workers-0"), Host(name="workers-1"))


def test_a_session_that_is_taken_over_has_meshes_of_the_size_that_they_were_attached_with(
    gateway: ScriptedGateway,
) -> None:
    """The job may have been scaled since, or before."""
    client = Client(UrlDialer(gateway.url, TOKEN), session_id="ab" * 16, mesh_sizes={"workers": 2})
    client.wait_connected()
    assert client.takeover is not None
    session = gateway.session()
    hosts = tuple(Host(name=f"workers-{rank}") for rank in range(3))
    attached = Attached(name="train", takeovers=1, next_object=2, next_call=1)
    for header in (AttachHosts(object=1, mesh="workers"), HostsAttached(object=1, hosts=hosts), attached):
        gateway.do(lambda header=header: session.send(header))
    client.takeover.complete.get(timeout=60)
    remote = client.objects.get(1)
    assert remote is not None
    assert (remote.expected_hosts, remote.failure) == (3, None)
    client.close()


def test_a_session_that_ends_before_its_state_has_arrived_fails_the_takeover(gateway: ScriptedGateway) -> None:
    client = Client(UrlDialer(gateway.url, TOKEN), session_id="ab" * 16)
    client.wait_connected()
    assert client.takeover is not None
    assert not client.takeover.complete.done()
    gateway.refuse = lambda request: (410, {"error": "gone", "reason": "was killed by SIGKILL", "output": ""})
    gateway.cut()
    with pytest.raises(EngineDiedError, match="was killed by SIGKILL"):
        client.takeover.complete.get(timeout=60)
    client.close()


@pytest.fixture
def dispatcher() -> Iterator[Dispatcher]:
    dispatcher = Dispatcher(
        ObjectTable(),
        PendingCalls(),
        reader=None,  # type: ignore[arg-type]  # no call is answered
        consume=lambda message: None,
        release=lambda number: None,
    )
    yield dispatcher
    dispatcher.close(10)


class Untold(io.StringIO):
    """Does not say whether it is a terminal."""

    def isatty(self) -> bool:
        raise RuntimeError("not known")


@pytest.mark.parametrize("stream", [io.StringIO, Untold])
def test_a_file_gets_the_first_and_the_last_notice_of_an_outage(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]
) -> None:
    printed = stream()
    monkeypatch.setattr(sys, "stderr", printed)
    for text, final in [("first", False), ("second", False), ("third", False), ("end", True), ("next", False)]:
        dispatcher.connection_notice(text, final)
    dispatcher.close(10)
    assert printed.getvalue() == "[meshgate] first\n[meshgate] end\n[meshgate] next\n"


def test_the_traceback_of_the_end_of_a_session_does_not_grow_with_the_calls_that_it_fails(
    gateway: ScriptedGateway, settings: ClientSettings
) -> None:
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings)
    gateway.on[Call] = lambda *_: None
    mesh = counters(client)
    calls = [mesh.add.call(1) for _ in range(5)]
    client.close()
    errors = [call.exception(timeout=20) for call in calls]
    assert {type(error) for error in errors} == {GatewayError}
    assert len(set(map(id, errors))) == len(errors)
    assert len({len(traceback.extract_tb(error.__traceback__)) for error in errors if error}) == 1
