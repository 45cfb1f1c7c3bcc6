from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from meshgate.actors import Actor, as_endpoint, endpoint
from meshgate.channel import Channel
from meshgate.client import Client
from meshgate.dialing import UrlDialer
from meshgate.errors import InvalidRequestError, UnpicklableArgument
from meshgate.proxies import Accumulator, ActorMeshProxy, HostMeshProxy, ProcMeshProxy, send
from meshgate.settings import ClientSettings
from meshgate_wire.messages import Argument, Call, MeshRef, SendTo, SpawnActors, SpawnProcs
from tests.client.counting import Counter
from tests.client.fake_gateway import TOKEN, FakeGateway, Reference


@pytest.fixture
def hosts(client: Client) -> HostMeshProxy:
    return client.attach_hosts("workers", 2)


@pytest.fixture
def procs(hosts: HostMeshProxy) -> ProcMeshProxy:
    return hosts.spawn_procs(per_host={"gpus": 2}, name="trainers")


@pytest.fixture
def mesh(procs: ProcMeshProxy) -> Any:
    return procs.spawn("counters", Counter)


# --- shapes -----------------------------------------------------------------------------------------------


def test_shapes_are_known_before_anything_is_answered(hosts: HostMeshProxy, procs: ProcMeshProxy, mesh: Any) -> None:
    assert hosts.sizes == {"hosts": 2}
    assert procs.sizes == mesh.sizes == {"hosts": 2, "gpus": 2}
    assert len(mesh) == mesh.size() == 4
    assert mesh.size("gpus") == 2
    assert mesh.slice(hosts=0).sizes == {"gpus": 2}
    assert mesh.flatten("all").sizes == {"all": 4}
    assert mesh.rename(gpus="tp").sizes == {"hosts": 2, "tp": 2}
    assert procs.split(gpus=("dp", "tp"), tp=2).sizes == {"hosts": 2, "dp": 1, "tp": 2}


def test_meshes_are_equal_when_they_name_the_same_ranks(hosts: HostMeshProxy, mesh: Any) -> None:
    assert mesh.slice(hosts=0) == mesh.slice(hosts=0)
    assert hash(mesh.slice(hosts=0)) == hash(mesh.slice(hosts=0))
    assert mesh.slice(hosts=0) != mesh.slice(hosts=1)
    assert mesh != hosts
    assert mesh != 5
    assert mesh.slice() is mesh


def test_meshes_say_what_they_are(hosts: HostMeshProxy, procs: ProcMeshProxy, mesh: Any) -> None:
    assert repr(hosts) == "HostMesh('workers', {hosts=2})"
    assert repr(procs.slice(hosts=0)) == "ProcMesh('trainers', {gpus=2})"
    assert repr(mesh) == f"ActorMesh(class={Counter}, shape={{hosts=2,gpus=2}})"
    assert repr(mesh.add) == f"<endpoint counters.add of {mesh!r}>"


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (lambda mesh: mesh.slice(gpus=5), IndexError, "index out of range"),
        (lambda mesh: mesh.slice(rows=0), TypeError, "does not have dimension labeled 'rows'"),
        (lambda mesh: mesh.size("rows"), KeyError, "does not have dimension 'rows'"),
    ],
)
def test_a_slice_out_of_range_raises_here(
    mesh: Any, wrong: Callable[[Any], Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        wrong(mesh)


# --- hosts ------------------------------------------------------------------------------------------------


def test_labels_that_clash_raise_here_in_monarchs_words(gateway: FakeGateway, hosts: HostMeshProxy) -> None:
    with pytest.raises(ValueError, match=r"per_host labels \['hosts'\] overlap with host labels \('hosts',\)"):
        hosts.spawn_procs(per_host={"hosts": 2})
    hosts.initialized.get(timeout=20)
    assert gateway.got(SpawnProcs) == []


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_a_number_of_processes_must_be_one(hosts: HostMeshProxy, count: Any) -> None:
    with pytest.raises(ValueError, match="expected a number of processes"):
        hosts.spawn_procs(per_host={"gpus": count})


@pytest.mark.parametrize("argument", ["proc_bind", "bootstrap_command"])
def test_what_a_gateway_cannot_do_is_refused_by_name(hosts: HostMeshProxy, argument: str) -> None:
    with pytest.raises(InvalidRequestError, match=argument):
        hosts.spawn_procs(per_host={"gpus": 1}, **{argument: [{}]})  # type: ignore[arg-type]


def test_bootstrap_travels_as_code_or_by_name(gateway: FakeGateway, hosts: HostMeshProxy) -> None:
    carried: list[Any] = []
    gateway.on[SpawnProcs] = lambda session, header, buffers: carried.append(pickle.loads(buffers[0].join()))
    hosts.spawn_procs(bootstrap=lambda: 42)  # type: ignore[arg-type]
    hosts.initialized.get(timeout=20)
    assert carried[0]() == 42


def test_bootstrap_may_not_carry_data(hosts: HostMeshProxy) -> None:
    data = b"x" * 1_000_000
    with pytest.raises(UnpicklableArgument, match=r"bootstrap carries 1\.0 MB"):
        hosts.spawn_procs(bootstrap=functools.partial(print, pickle.PickleBuffer(data)))


def test_an_actor_on_hosts_has_one_process_a_host(gateway: FakeGateway, hosts: HostMeshProxy) -> None:
    mesh: Any = hosts.spawn("counters", Counter)
    assert mesh.sizes == {"hosts": 2}
    hosts.initialized.get(timeout=20)
    assert gateway.got(SpawnProcs)[0].per_host == {}


def test_the_host_of_a_process_is_found_by_rank(hosts: HostMeshProxy, procs: ProcMeshProxy) -> None:
    assert procs.slice(hosts=1, gpus=0).host_mesh == hosts.slice(hosts=1)
    assert procs.slice(hosts=0, gpus=1).host_mesh == hosts.slice(hosts=0)
    on_second = hosts.slice(hosts=1).spawn_procs(per_host={"gpus": 2})
    assert on_second.slice(gpus=1).host_mesh == hosts.slice(hosts=1)
    with pytest.raises(NotImplementedError, match="non-singleton proc meshes"):
        _ = procs.host_mesh


# --- actors -----------------------------------------------------------------------------------------------


class WithStop(Actor):
    @endpoint
    def stop(self) -> None: ...  # type: ignore[override]


class Mixed(Actor):
    @endpoint
    def one(self) -> None: ...

    @endpoint
    async def two(self) -> None: ...


@pytest.mark.parametrize(
    ("Class", "said"),
    [
        (int, "must subclass monarch.service.Actor to spawn it"),
        (WithStop, "collides with an endpoint name"),
        (Mixed, "mixes both async and sync endpoints"),
    ],
)
def test_a_class_that_cannot_be_spawned_raises_here(procs: ProcMeshProxy, Class: type, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        procs.spawn("name", Class)


def test_wrong_constructor_arguments_raise_here(procs: ProcMeshProxy) -> None:
    with pytest.raises(TypeError, match="too many positional arguments"):
        procs.spawn("counters", Counter, 1, 2)


def test_a_class_of_a_module_goes_by_name_and_a_local_one_as_code(gateway: FakeGateway, procs: ProcMeshProxy) -> None:
    class Local(Actor):
        @endpoint
        def here(self) -> int: ...

    carried: list[bytes] = []
    gateway.on[SpawnActors] = lambda session, header, buffers: carried.append(buffers[0].join())
    procs.spawn("counters", Counter)
    procs.spawn("local", Local)
    procs.initialized.get(timeout=20)
    assert pickle.loads(carried[0]) is Counter
    assert len(carried[0]) < 100
    assert b"here" in carried[1]
    header = gateway.got(SpawnActors)[0]
    assert header.class_name == f"{Counter.__module__}.Counter"
    assert header.kind == "sync"


def test_endpoints_are_attributes_and_nothing_else_is(mesh: Any) -> None:
    assert mesh.add is mesh.add
    assert {"add", "echo", "ported"} <= set(dir(mesh))
    with pytest.raises(AttributeError, match="nope"):
        _ = mesh.nope
    assert isinstance(mesh, ActorMeshProxy)
    assert mesh.__name__ == "Counter"


def test_a_method_that_is_no_endpoint_says_what_to_do(mesh: Any) -> None:
    with pytest.raises(
        RuntimeError, match=r"plain is not annotated as an endpoint. To call it as one, add a @endpoint"
    ):
        mesh.plain(1)


def test_as_endpoint_calls_a_method_that_is_none(gateway: FakeGateway, mesh: Any) -> None:
    gateway.functions["plain"] = lambda rank, value: value + rank
    assert as_endpoint(mesh.plain).call(10).get(timeout=20).values() == [10, 11, 12, 13]
    with pytest.raises(TypeError, match="missing a required argument: 'value'"):
        as_endpoint(mesh.plain).call()
    with pytest.raises(ValueError, match="expected an method of a spawned actor"):
        as_endpoint(5)


@pytest.mark.parametrize("adverb", ["call", "choose", "stream", "broadcast"])
def test_wrong_arguments_raise_at_the_call(mesh: Any, adverb: str) -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'amount'"):
        getattr(mesh.add, adverb)()
    with pytest.raises(TypeError, match="unexpected keyword argument 'thrice'"):
        getattr(mesh.add, adverb)(1, thrice=True)


def test_call_one_needs_exactly_one_actor(mesh: Any) -> None:
    with pytest.raises(ValueError, match="call_one requires exactly 1 actor, but mesh has 4"):
        mesh.add.call_one(1)


def test_rref_is_refused_with_a_way_out(mesh: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"use call\(\)"):
        mesh.add.rref(1)


def test_a_ported_endpoint_is_called_without_its_port(gateway: FakeGateway, mesh: Any) -> None:
    gateway.functions["ported"] = lambda rank, value: value
    assert mesh.ported.call("x").get(timeout=20).values() == ["x"] * 4
    assert gateway.got(Call)[0].explicit_port is True
    with pytest.raises(TypeError, match="too many positional arguments"):
        mesh.ported.call("port", "x")


def test_an_argument_that_cannot_travel_is_named_and_nothing_is_sent(gateway: FakeGateway, mesh: Any) -> None:
    mesh.initialized.get(timeout=20)
    with pytest.raises(UnpicklableArgument, match="argument 'value'") as caught:
        mesh.echo.call({"lock": [__import__("threading").Lock()]})
    assert "['lock'][0]" in str(caught.value)
    assert gateway.got(Call) == []


# --- proxies as arguments ---------------------------------------------------------------------------------


def test_proxies_as_arguments_become_references(
    gateway: FakeGateway, hosts: HostMeshProxy, procs: ProcMeshProxy, mesh: Any
) -> None:
    seen: list[Any] = []
    gateway.functions["echo"] = lambda rank, value: seen.append(value)
    port, _ = Channel.open()
    mesh.slice(hosts=0, gpus=0).echo.call_one([mesh, mesh.slice(hosts=1), procs, hosts, port, mesh]).get(timeout=20)
    (carried,) = seen
    assert all(isinstance(each, Reference) for each in carried)
    arguments: list[Argument] = [each.argument for each in carried]
    assert [argument.kind for argument in arguments] == ["actors", "actors", "procs", "hosts", "port", "actors"]
    assert arguments[0].ref == MeshRef(object=mesh._object) == arguments[5].ref
    assert arguments[1].ref.region == mesh.slice(hosts=1)._shape.to_wire()


def test_a_mesh_of_another_session_is_refused(gateway: FakeGateway, mesh: Any, settings: ClientSettings) -> None:
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings) as other:
        foreign = other.attach_hosts("workers", 2)
        with pytest.raises(InvalidRequestError, match="belongs to another session"):
            mesh.echo.call(foreign)


def test_a_proxy_cannot_be_pickled_on_its_own(hosts: HostMeshProxy, mesh: Any) -> None:
    port, _ = Channel.open()
    for thing in (hosts, mesh, port):
        for dumps in (pickle.dumps, cloudpickle.dumps):
            with pytest.raises(UnpicklableArgument, match="argument of an endpoint"):
                dumps(thing)
    assert copy.copy(mesh) is copy.deepcopy(mesh) is mesh


# --- send, Accumulator ------------------------------------------------------------------------------------


def test_send_directs_answers_to_a_port(gateway: FakeGateway, mesh: Any) -> None:
    port, _ = Channel.open()
    send(mesh.slice(hosts=1).add, (1,), {"twice": True}, port, selection="choose")
    mesh.initialized.get(timeout=20)
    (header,) = gateway.got(SendTo)
    assert header.port == port._known.number
    assert header.selection == "choose"
    assert header.target.region is not None


def test_send_without_a_port_drops_the_answers(gateway: FakeGateway, mesh: Any) -> None:
    gateway.functions["add"] = lambda rank, amount: amount
    send(mesh.add, (1,), {})
    send(mesh.add, (1,), {}, selection="choose")
    mesh.initialized.get(timeout=20)
    assert [header.adverb for header in gateway.got(Call)] == ["broadcast", "choose"]


def test_send_checks_what_it_is_given(mesh: Any) -> None:
    with pytest.raises(TypeError, match="needs an endpoint"):
        send(5, (), {})
    with pytest.raises(ValueError, match="expected 'all' or 'choose'"):
        send(mesh.add, (1,), {}, selection="some")  # type: ignore[arg-type]


def test_accumulator_folds_all_answers(gateway: FakeGateway, mesh: Any) -> None:
    gateway.functions["add"] = lambda rank, amount: rank * amount
    assert Accumulator(mesh.add, 1000, lambda total, value: total + value).accumulate(10).get(timeout=20) == 1060
