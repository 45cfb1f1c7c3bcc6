from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from typing import Any

import cloudpickle
import pytest

from meshgate.errors import InvalidRequestError, UnpicklableArgument
from meshgate.proxies import HostMeshProxy, ProcMeshProxy
from meshgate.proxies.client import Channel, Client
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


def test_numpy_takes_meshes_for_scalars(mesh: Any) -> None:
    numpy = pytest.importorskip("numpy")
    assert numpy.array([mesh, mesh], dtype=object).shape == (2,)
    assert numpy.int64(3) != mesh


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


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_an_unpickled_mesh_is_a_reference_that_cannot_stop_it(
    pickler: Any, hosts: HostMeshProxy, procs: ProcMeshProxy, mesh: Any
) -> None:
    python = hosts.with_python_executable("/usr/bin/python3")
    for known in (hosts, procs, mesh, mesh.slice(hosts=1), python):
        again = pickler.loads(pickler.dumps(known))
        assert again == known
        assert type(again) is type(known)
        assert again._ref == known._ref
    again = pickle.loads(pickle.dumps(hosts))
    for end in (again.stop, again.shutdown, again.with_python_executable("python3").stop):
        with pytest.raises(RuntimeError, match="is a reference instead of owned"):
            end()
    with pytest.raises(ValueError, match="not owned"):
        pickle.loads(pickle.dumps(procs)).stop().get(timeout=20)
    with pytest.raises(NotImplementedError):
        pickle.loads(pickle.dumps(mesh)).stop().get(timeout=20)


def test_an_unpickled_mesh_can_be_called_and_spawned_on(gateway: ScriptedGateway, procs: ProcMeshProxy) -> None:
    gateway.functions["add"] = lambda rank, amount: rank
    again = pickle.loads(pickle.dumps(procs.slice(hosts=1)))
    more = again.spawn("more", Counter)
    mesh = pickle.loads(pickle.dumps(more))
    assert mesh.add.call(1).get(timeout=20).values() == [2, 3]
    assert again.slice(gpus=0).host_mesh.sizes == {}


def test_a_mesh_is_unpickled_only_where_its_session_holds_it(hosts: HostMeshProxy) -> None:
    pickled = pickle.dumps(hosts.spawn_procs(name="forgotten"))
    gc.collect()
    with pytest.raises(InvalidRequestError, match=r"cannot unpickle ProcMesh\('forgotten'.*job.dump"):
        pickle.loads(pickled)
    elsewhere = run(f"import pickle; pickle.loads({pickle.dumps(hosts)!r})")
    assert "InvalidRequestError: cannot unpickle HostMesh('workers'" in elsewhere.stderr


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_a_mesh_for_workers_is_an_argument(hosts: HostMeshProxy, mesh: Any) -> None:
    with pytest.raises(InvalidRequestError, match="only as an argument"):
        hosts.spawn_procs(bootstrap=lambda: mesh.add.call(1))
    port, _ = Channel.open()
    for dumps in (pickle.dumps, cloudpickle.dumps):
        with pytest.raises(UnpicklableArgument, match="argument of an endpoint"):
            dumps(port)
    assert copy.copy(mesh) is copy.deepcopy(mesh) is mesh


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (3, TypeError, "^the name of a mesh must be a string, not 3"),
        ("a\udc80", ValueError, "contains surrogate characters"),
        ("x" * 257, ValueError, "^the name of a mesh may have 256 characters, but 'x{79}… has 257$"),
    ],
)
def test_an_invalid_name_is_rejected(name: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        require_name(name)


def test_a_port_of_another_session_is_rejected(gateway: ScriptedGateway, mesh: Any, settings: ClientSettings) -> None:
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings) as other:
        port, _ = Channel.open(client=other)
        with pytest.raises(InvalidRequestError, match="this port belongs to another session"):
            mesh.echo.call(port)
