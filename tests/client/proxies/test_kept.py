"""Kept meshes: what is sent for them, and when they are released, with a gateway that answers by a script."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from meshgate.errors import ActorError, InvalidRequestError, UnpicklableArgument, UnreadableResult, ValueLostError
from meshgate.proxies.client import Channel, Client
from meshgate.proxies.endpoints import send
from meshgate.proxies.kept import KeptInfo, KeptMesh
from meshgate.session.dialing import UrlDialer
from meshgate_wire import Fragments
from meshgate_wire.messages import (
    Call,
    Failed,
    Failure,
    NameKept,
    PortSend,
    PutValue,
    ReadKept,
    Release,
    SendTo,
    Values,
    stream_of,
)
from tests.client.counting import Counter, counters
from tests.client.scripted_gateway import TOKEN, ScriptedGateway, ScriptedSession
from tests.waiting import wait_for

TIMEOUT = 60.0
DESCRIPTION = pickle.dumps({"type": "numpy.ndarray", "nbytes": 48, "dtype": "float32", "shape": (3, 4)})


@pytest.fixture(autouse=True)
def keeping(gateway: ScriptedGateway) -> None:
    """Every value is described alike, and read as the rank that it is of."""

    def answer(session: ScriptedSession, header: Call | PutValue | ReadKept, buffers: Sequence[Fragments]) -> None:
        ref = header.target
        count = 4 if ref.region is None else math.prod(ref.region.sizes)
        first = ref.region.offset if ref.region is not None else 0
        data = [pickle.dumps(first + at) if isinstance(header, ReadKept) else DESCRIPTION for at in range(count)]
        session.send(Values(call=header.call), *data, stream=stream_of(ref.object))

    gateway.on.update({Call: answer, PutValue: answer, ReadKept: answer})


def fail(gateway: ScriptedGateway, kind: type, failure: Failure, *buffers: bytes) -> None:
    """Answers messages of ``kind`` with ``failure``."""

    def answer(session: ScriptedSession, header: Any, _: Sequence[Fragments]) -> None:
        session.send(Failed(call=header.call, failure=failure), *buffers, stream=stream_of(header.target.object))

    gateway.on[kind] = answer


def test_keep_returns_at_once_with_the_shape_of_the_mesh(gateway: ScriptedGateway, client: Client) -> None:
    kept = counters(client).slice(hosts=1).echo.keep(1)
    assert isinstance(kept, KeptMesh)
    assert (kept.sizes, len(kept)) == ({"gpus": 2}, 2)
    assert kept.info(TIMEOUT).get(1) == KeptInfo("numpy.ndarray", 48, "float32", (3, 4))
    (call,) = gateway.got(Call)
    assert (call.adverb, call.keep, call.endpoint) == ("call", kept._remote.number, "echo")
    assert repr(kept) == "<KeptMesh counters.echo.keep(): {gpus: 2}, 0.0 MB>"


def test_only_what_is_answered_can_say_that_the_call_that_keeps_has_failed(client: Client) -> None:
    mesh = counters(client)
    port, _ = Channel.open(client=client)
    kept = mesh.echo.keep(1)
    mesh.echo.broadcast(kept)
    send(mesh.echo, (kept,), {}, port)
    port.send(kept.all())
    assert kept._values.request is not None  # its failure is reported if the program does not read it
    mesh.echo.call(kept)
    assert kept._values.request is None


def test_plain_calls_after_one_that_keeps_do_not_keep(gateway: ScriptedGateway, client: Client) -> None:
    mesh = counters(client)
    for _ in range(2):
        mesh.echo.call(1).get(TIMEOUT)
        mesh.echo.keep(1).info(TIMEOUT)
    keeps = [header.keep for header in gateway.got(Call)]
    assert [bool(keep) for keep in keeps] == [False, True, False, True]
    assert keeps[1] != keeps[3]


def test_a_part_of_the_values_is_fetched(gateway: ScriptedGateway, client: Client) -> None:
    kept = counters(client).echo.keep(1)
    assert kept.get(TIMEOUT).values() == [0, 1, 2, 3]
    assert kept.slice(hosts=1).get(TIMEOUT).values() == [2, 3]
    assert kept.slice(hosts=1, gpus=1).info(TIMEOUT).item() == KeptInfo("numpy.ndarray", 48, "float32", (3, 4))
    assert kept.slice() is kept


def test_arguments_name_the_values_and_whether_all_are_passed(gateway: ScriptedGateway, client: Client) -> None:
    mesh = counters(client)
    kept = mesh.echo.keep(1)
    mesh.echo.call({"inside": [kept, kept.all()]}).get(TIMEOUT)
    by_rank, whole = gateway.got(Call)[-1].arguments
    assert (by_rank.kind, by_rank.ref.object, by_rank.whole) == ("kept", kept._remote.number, False)
    assert (by_rank.ref.region.sizes, whole.whole) == ((2, 2), True)
    assert repr(kept.all()).endswith(">.all()")


def test_arguments_say_whether_references_are_passed(gateway: ScriptedGateway, client: Client) -> None:
    mesh = counters(client)
    kept = mesh.echo.keep(1)
    mesh.echo.call([kept.ref(), kept.all().ref(), kept.ref().ref()]).get(TIMEOUT)
    found = [(each.kind, each.whole, each.reference) for each in gateway.got(Call)[-1].arguments]
    assert found == [("kept", False, True), ("kept", True, True), ("kept", False, True)]
    assert repr(kept.all().ref()).endswith(">.all().ref()")
    with pytest.raises(ValueError, match=r"counters\.echo runs on \{gpus: 2\}, but the values of"):
        mesh.slice(hosts=0).echo.call(kept.ref())
    with pytest.raises(UnpicklableArgument):
        pickle.dumps(kept.ref())


def returning(gateway: ScriptedGateway, number: int) -> None:
    """Endpoints return references to the values of object ``number``."""

    def answer(session: ScriptedSession, header: Call, _: Sequence[Fragments]) -> None:
        found = [b"c_meshgate_kept\nKeptRef\n(I%d\nI%d\nI%d\nVthe call\ntR." % (number, at, at) for at in range(4)]
        session.send(Values(call=header.call), *found, stream=stream_of(header.target.object))

    gateway.on[Call] = answer


def test_references_that_actors_return_are_kept_meshes(gateway: ScriptedGateway, client: Client) -> None:
    mesh = counters(client)
    kept = mesh.echo.keep(1)
    kept.info(TIMEOUT)
    returning(gateway, kept._remote.number)
    returned = mesh.echo.call(kept.ref()).get(TIMEOUT).values()
    del kept
    gc.collect()
    assert [each.get(TIMEOUT).item() for each in returned] == [0, 1, 2, 3]
    assert (returned[2].sizes, returned[2].info(TIMEOUT).item().shape) == ({}, (3, 4))
    mesh.echo.broadcast(returned[3])
    number = returned[0]._remote.number
    assert not gateway.got(Release)
    del returned
    gc.collect()
    wait_for(lambda: any(number in each.objects for each in gateway.got(Release)), "the values are released")
    with pytest.raises(UnreadableResult, match="reference to a value of the call, of which the program holds no kept"):
        mesh.echo.call(1).get(TIMEOUT).values()


def test_references_to_named_values_are_kept_meshes_although_the_program_holds_none(
    gateway: ScriptedGateway, client: Client
) -> None:
    mesh = counters(client)
    kept = mesh.echo.keep(1).named("samples")
    kept.info(TIMEOUT)
    returning(gateway, kept._remote.number)
    del kept
    gc.collect()
    returned = mesh.echo.call(1).get(TIMEOUT).values()
    assert returned[0].get(TIMEOUT).item() == 0
    returned[0].release()
    del returned
    gc.collect()
    with pytest.raises(UnreadableResult, match="keep the values with named"):
        mesh.echo.call(1).get(TIMEOUT).values()


def test_values_that_do_not_fit_are_refused_before_anything_is_sent(gateway: ScriptedGateway, client: Client) -> None:
    mesh = counters(client)
    kept = mesh.echo.keep(1)
    with pytest.raises(ValueError, match=r"counters\.echo runs on \{gpus: 2\}, but the values of counters\.echo\.keep"):
        mesh.slice(hosts=0).echo.call(kept)
    with pytest.raises(
        ValueError, match=r"counters\.echo runs on one rank, but .* have \{hosts: 2, gpus: 2\}\. Nothing"
    ):
        mesh.slice(hosts=0, gpus=0).echo.call(kept)
    with pytest.raises(ValueError, match=r"\{hosts: 2, gpus: 2\}, but .* have \{gpus: 2\}\. Nothing was sent"):
        mesh._procs.spawn("others", Counter, kept.slice(hosts=0))
    mesh.echo.call(kept.slice(hosts=0, gpus=0)).get(TIMEOUT)  # one value for all
    assert len(gateway.got(Call)) == 2


def test_put_and_messages_to_ports_and_of_send_name_the_values(gateway: ScriptedGateway, client: Client) -> None:
    mesh = counters(client)
    kept = mesh.echo.keep(1)
    port, _receiver = Channel.open(client=client)
    mesh._procs.put([kept]).info(TIMEOUT)
    port.send((kept.slice(hosts=1, gpus=0), kept.all()))
    send(mesh.echo, (kept,), {}, port)
    mesh.echo.call(1).get(TIMEOUT)
    wait_for(lambda: gateway.got(PortSend), "the message arrived")
    (put,), (sent,), (called,) = gateway.got(PutValue), gateway.got(PortSend), gateway.got(SendTo)
    for header in (put, sent, called):
        assert {(each.kind, each.ref.object) for each in header.arguments} == {("kept", kept._remote.number)}
    assert [each.whole for each in sent.arguments] == [False, True]
    assert stream_of(port._remote.number) in kept._remote.streams  # so that the release does not overtake the message


def test_put_and_ports_refuse_values_that_do_not_fit(gateway: ScriptedGateway, client: Client) -> None:
    mesh = counters(client)
    kept = mesh.echo.keep(1)
    port, _receiver = Channel.open(client=client)
    with pytest.raises(ValueError, match=r"a port sends one message, but .* have \{hosts: 2, gpus: 2\}\. Nothing was"):
        port.send(kept)
    with pytest.raises(ValueError, match=r"counters\.put\(\) runs on \{gpus: 2\}, but .* have \{hosts: 2, gpus: 2\}"):
        mesh.slice(hosts=0).put(kept)
    kept.release()
    with pytest.raises(InvalidRequestError, match="released"):
        port.send(kept.slice(hosts=0, gpus=0))
    mesh.echo.call(1).get(TIMEOUT)
    assert not gateway.got(PortSend) + gateway.got(PutValue)


def test_kept_values_cannot_be_pickled_or_copied(gateway: ScriptedGateway, client: Client) -> None:
    mesh = counters(client)
    kept = mesh.echo.keep(1)
    with pytest.raises(UnpicklableArgument, match="can be an argument of endpoints"):
        pickle.dumps(kept)
    with pytest.raises(UnpicklableArgument):
        copy.copy(kept)


def test_what_is_put_is_sent_once(gateway: ScriptedGateway, client: Client) -> None:
    mesh = counters(client)
    kept = mesh._procs.put(b"data")
    assert kept.info(TIMEOUT).get(3).bytes == 48
    (put,) = gateway.got(PutValue)
    assert (put.target.object, put.keep) == (mesh._procs._object, kept._remote.number)
    assert mesh.slice(hosts=0).put(b"data").sizes == {"gpus": 2}
    with pytest.raises(
        UnpicklableArgument, match=r"cannot pickle argument 'value' of counters\.put \(the lock at \[1\]\)"
    ):
        mesh.put([1, threading.Lock()])


def test_values_are_released_with_their_last_slice_on_each_stream_that_named_them(
    gateway: ScriptedGateway, client: Client
) -> None:
    mesh, others = counters(client), counters(client)
    kept = mesh.echo.keep(1)
    part = kept.slice(hosts=0)
    others.echo.call(kept).get(TIMEOUT)
    number = kept._remote.number
    del kept
    gc.collect()
    part.get(TIMEOUT)
    assert not [each for each in gateway.got(Release) if number in each.objects]
    del part
    gc.collect()

    def parts() -> list[int]:
        return [each.parts for each in gateway.got(Release) if number in each.objects]

    wait_for(lambda: parts() == [3, 3, 3], "the release")
    assert client.objects.get(number) is None


def test_named_values_stay_until_they_are_released(gateway: ScriptedGateway, client: Client) -> None:
    kept = counters(client).echo.keep(1)
    number, procs = kept._remote.number, kept._remote.parents[0]
    assert kept.named("batch") is kept
    with pytest.raises(TypeError, match="must be a string"):
        kept.named(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not be empty"):
        kept.named("")
    found = counters(client).echo.keep(1)  # of which nothing is named
    last = found._remote.number
    del kept, found
    gc.collect()

    def released() -> list[int]:
        return [each for header in gateway.got(Release) for each in header.objects]

    wait_for(lambda: last in released(), "the release")
    (header,) = gateway.got(NameKept)
    assert (header.kept, header.name, header.label, header.procs) == (number, "batch", "counters.echo.keep()", procs)
    assert header.region.sizes == (2, 2)
    assert number not in released()


def test_released_values_cannot_be_used(gateway: ScriptedGateway, client: Client) -> None:
    mesh = counters(client)
    kept = mesh.echo.keep(1)
    kept.release()
    kept.release()
    for use in (kept.get, kept.info, lambda: mesh.echo.call(kept), lambda: mesh.echo.call(kept.all())):
        with pytest.raises(InvalidRequestError, match=r"the values of counters\.echo\.keep\(\) were released"):
            use()
    assert repr(kept).endswith("released>")


def test_room_is_made_before_more_is_kept(gateway: ScriptedGateway, client: Client) -> None:
    mesh = counters(client)
    for _ in range(5):
        mesh.echo.keep(1).release()
    mesh.echo.keep(1).info(TIMEOUT)
    order = [type(header) for header in gateway.received if isinstance(header, (Call, Release))]
    for at, kind in enumerate(order):
        if kind is Call:
            assert order[:at].count(Release) >= 2 * (order[:at].count(Call) - 1)


def test_a_failure_names_the_call_that_should_have_kept_the_value(gateway: ScriptedGateway, client: Client) -> None:
    mesh = counters(client)
    kept = mesh.echo.keep(1)
    kept.info(TIMEOUT)
    failure = Failure(kind="actor", message="no", step="counters.echo.keep()", mesh="counters", ranks=(1,), total=4)
    fail(gateway, Call, failure)
    with pytest.raises(ActorError) as raised:
        mesh.add.call(kept).get(TIMEOUT)
    first, second, *_ = str(raised.value).splitlines()
    assert first == "counters.add could not run, because the call whose result it takes failed."
    assert second.startswith("Actor call counters.echo.keep() failed on rank 1")
    assert raised.value.endpoint == "counters.echo.keep()"


def test_a_lost_value_names_the_rank_the_call_and_the_remedy(gateway: ScriptedGateway, client: Client) -> None:
    mesh = counters(client)
    kept = mesh.echo.keep(1)
    failure = Failure(
        kind="lost", message="killed", step="counters.echo.keep()", ranks=(1, 2), hosts={1: "workers-0", 2: "workers-1"}
    )
    fail(gateway, ReadKept, failure)
    fail(gateway, Call, failure)
    with pytest.raises(ValueLostError, match=r"counters\.add could not run: the values of .* on ranks 1-2 \(workers-0"):
        mesh.add.call(kept).get(TIMEOUT)
    with pytest.raises(ValueLostError, match=r"^the values of counters\.echo\.keep\(\)[^:]*are lost") as lost:
        kept.get(TIMEOUT)
    assert (lost.value.ranks, lost.value.call) == ((1, 2), "counters.echo.keep()")
    assert "Call keep() or put() again" in str(lost.value)


def test_values_of_another_session_are_refused(gateway: ScriptedGateway, client: Client) -> None:
    kept = counters(client).echo.keep(1)
    with (
        Client.connect(UrlDialer(gateway.url, TOKEN)) as other,
        pytest.raises(InvalidRequestError, match="belongs to another session"),
    ):
        counters(other).echo.call(kept)


def test_a_mesh_that_has_failed_keeps_nothing(gateway: ScriptedGateway, client: Client) -> None:
    mesh = counters(client)
    kept = mesh.echo.keep(1)
    kept.info(TIMEOUT)
    mesh.stop().get(TIMEOUT)
    with pytest.raises(RuntimeError, match="was stopped"):
        mesh.echo.keep(1)
    assert kept.get(TIMEOUT).values() == [0, 1, 2, 3]  # the processes go on
    mesh._procs.stop().get(TIMEOUT)
    with pytest.raises(RuntimeError, match="was stopped"):
        kept.get(TIMEOUT)
