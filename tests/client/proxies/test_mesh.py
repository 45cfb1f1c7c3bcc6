from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from meshgate.errors import InvalidRequestError, UnpicklableArgument
from meshgate.proxies import HostMeshProxy, ProcMeshProxy
from meshgate.proxies.channels import Channel
from meshgate.proxies.client import Client
from meshgate.proxies.mesh import require_name
from meshgate.session.dialing import UrlDialer
from meshgate.session.settings import ClientSettings
from meshgate_wire.messages import Argument, MeshRef
from tests.client.counting import Counter
from tests.client.scripted_gateway import TOKEN, Reference, ScriptedGateway


def test_shapes_are_known_before_any_reply(hosts: HostMeshProxy, procs: ProcMeshProxy, mesh: Any) -> None:
    assert hosts.sizes == {"hosts": 2}
    assert procs.sizes == mesh.sizes == {"hosts": 2, "gpus": 2}
    assert len(mesh) == mesh.size() == 4
    assert mesh.size("gpus") == 2
    assert mesh.slice(hosts=0).sizes == {"gpus": 2}
    assert mesh.flatten("all").sizes == {"all": 4}
    assert mesh.rename(gpus="tp").sizes == {"hosts": 2, "tp": 2}
    assert procs.split(gpus=("dp", "tp"), tp=2).sizes == {"hosts": 2, "dp": 1, "tp": 2}


def test_meshes_are_equal_if_they_name_the_same_ranks(hosts: HostMeshProxy, mesh: Any) -> None:
    assert mesh.slice(hosts=0) == mesh.slice(hosts=0)
    assert hash(mesh.slice(hosts=0)) == hash(mesh.slice(hosts=0))
    assert mesh.slice(hosts=0) != mesh.slice(hosts=1)
    assert mesh != hosts
    assert mesh != 5
    assert mesh.slice() is mesh


def test_reprs_show_name_and_shape(hosts: HostMeshProxy, procs: ProcMeshProxy, mesh: Any) -> None:
    assert repr(hosts) == "HostMesh('workers', {hosts=2})"
    assert repr(procs.slice(hosts=0)) == "ProcMesh('trainers', {gpus=2})"
    assert repr(mesh) == f"ActorMesh(class={Counter}, shape={{hosts=2,gpus=2}})"
    assert repr(mesh.add) == f"<endpoint counters.add of {mesh!r}>"


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda mesh: mesh.slice(gpus=5), IndexError, "index out of range"),
        (lambda mesh: mesh.slice(rows=0), TypeError, "does not have dimension labeled 'rows'"),
        (lambda mesh: mesh.size("rows"), KeyError, "does not have dimension 'rows'"),
    ],
)
def test_an_invalid_slice_raises_at_once(
    mesh: Any, use: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        use(mesh)


def test_proxies_in_arguments_become_references(
    gateway: ScriptedGateway, hosts: HostMeshProxy, procs: ProcMeshProxy, mesh: Any
) -> None:
    values: list[Any] = []
    gateway.functions["echo"] = lambda rank, value: values.append(value)
    port, _ = Channel.open()
    mesh.slice(hosts=0, gpus=0).echo.call_one([mesh, mesh.slice(hosts=1), procs, hosts, port, mesh]).get(timeout=20)
    (received,) = values
    assert all(isinstance(each, Reference) for each in received)
    arguments: list[Argument] = [each.argument for each in received]
    assert [argument.kind for argument in arguments] == ["actors", "actors", "procs", "hosts", "port", "actors"]
    assert arguments[0].ref == MeshRef(object=mesh._object) == arguments[5].ref
    assert arguments[1].ref.region == mesh.slice(hosts=1)._shape.to_wire()


def test_a_mesh_of_another_session_is_rejected(gateway: ScriptedGateway, mesh: Any, settings: ClientSettings) -> None:
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


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [(3, TypeError, "must be a string, not 3"), ("a\udc80", ValueError, "contains surrogate characters")],
)
def test_an_invalid_name_is_rejected(name: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        require_name(name)


def test_a_port_of_another_session_is_rejected(gateway: ScriptedGateway, mesh: Any, settings: ClientSettings) -> None:
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings) as other:
        port, _ = Channel.open(client=other)
        with pytest.raises(InvalidRequestError, match="this port belongs to another session"):
            mesh.echo.call(port)
