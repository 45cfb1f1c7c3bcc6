from __future__ import annotations

import asyncio
import functools
import pickle
from typing import Any

import pytest

from meshgate.errors import (
    UnpicklableArgument,
)
from meshgate.proxies import ActorMeshProxy, HostMeshProxy, ProcMeshProxy
from meshgate.proxies.client import Client
from meshgate.session.dialing import UrlDialer
from meshgate.session.settings import ClientSettings
from meshgate_wire.messages import (
    Host,
    HostEnding,
    HostsAttached,
    Output,
    OutputLine,
    SpawnProcs,
)
from tests.client.counting import Counter
from tests.client.scripted_gateway import TOKEN, ScriptedGateway
from tests.waiting import wait_for


def test_overlapping_labels_raise_monarchs_error_and_send_nothing(
    gateway: ScriptedGateway, hosts: HostMeshProxy
) -> None:
    with pytest.raises(ValueError, match=r"per_host labels \['hosts'\] overlap with host labels \('hosts',\)"):
        hosts.spawn_procs(per_host={"hosts": 2})
    hosts.initialized.get(timeout=20)
    assert gateway.got(SpawnProcs) == []


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_a_process_count_must_be_a_positive_integer(hosts: HostMeshProxy, count: Any) -> None:
    with pytest.raises(ValueError, match="expected a number of processes"):
        hosts.spawn_procs(per_host={"gpus": count})


@pytest.mark.parametrize(
    ("per_host", "error", "text"),
    [
        (2, TypeError, 'per_host is 2: expected a number of processes for each dimension, such as {"gpus": 2}'),
        (["gpus"], ValueError, "per_host is ['gpus']: expected a number of processes for each dimension, such as "),
        ({2: 2}, TypeError, "per_host has the key 2: expected a number of processes for each dimension, such as "),
        ({"x" * 257: 2}, ValueError, "a dimension of per_host may have 256 characters, but 'xxx"),
        (
            {"gpus": 100_000},
            ValueError,
            "per_host['gpus'] is 100000: gateways accept at most 65536 processes in a dimension, so that a wrong "
            "number cannot exhaust the memory of hosts. A process takes about 60 MB",
        ),
    ],
)
def test_a_wrong_per_host_is_explained_and_nothing_is_sent(
    gateway: ScriptedGateway, hosts: HostMeshProxy, per_host: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        hosts.spawn_procs(per_host)
    assert type(caught.value) is error
    assert str(caught.value).startswith(text)
    hosts.initialized.get(timeout=20)
    assert gateway.got(SpawnProcs) == []


def test_a_bootstrap_function_is_sent(gateway: ScriptedGateway, hosts: HostMeshProxy) -> None:
    received: list[Any] = []
    gateway.on[SpawnProcs] = lambda session, header, buffers: received.append(pickle.loads(buffers[0].join()))
    hosts.spawn_procs(bootstrap=lambda: 42)  # type: ignore[arg-type]
    hosts.initialized.get(timeout=20)
    assert received[0]() == 42


def test_a_bootstrap_function_must_not_contain_data(hosts: HostMeshProxy) -> None:
    data = b"x" * 1_000_000
    with pytest.raises(UnpicklableArgument, match=r"bootstrap contains 1\.0 MB"):
        hosts.spawn_procs(bootstrap=functools.partial(print, pickle.PickleBuffer(data)))


def test_spawning_on_hosts_starts_one_process_on_each(gateway: ScriptedGateway, hosts: HostMeshProxy) -> None:
    mesh: Any = hosts.spawn("counters", Counter)
    assert mesh.sizes == {"hosts": 2}
    hosts.initialized.get(timeout=20)
    assert gateway.got(SpawnProcs)[0].per_host == {}


def test_host_mesh_is_the_host_of_the_process(hosts: HostMeshProxy, procs: ProcMeshProxy) -> None:
    assert procs.slice(hosts=1, gpus=0).host_mesh == hosts.slice(hosts=1)
    assert procs.slice(hosts=0, gpus=1).host_mesh == hosts.slice(hosts=0)
    on_second = hosts.slice(hosts=1).spawn_procs(per_host={"gpus": 2})
    assert on_second.slice(gpus=1).host_mesh == hosts.slice(hosts=1)
    with pytest.raises(NotImplementedError, match="non-singleton proc meshes"):
        _ = procs.host_mesh


def test_a_slice_cannot_be_stopped_and_stays_usable(gateway: ScriptedGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: rank
    procs = client.attach_hosts("workers", 2).spawn_procs()
    mesh: Any = procs.spawn("counters", Counter)
    with pytest.raises(NotImplementedError, match="requires an owned ActorMesh"):
        mesh.slice(hosts=0).stop().get(timeout=0)
    with pytest.raises(ValueError, match="must be stopped by an owner"):
        procs.slice(hosts=0).stop().get(timeout=0)
    assert mesh.add.call(1).get(timeout=20).values() == [0, 1]


def test_a_reason_to_stop_may_be_any_string_and_nothing_else(gateway: ScriptedGateway, client: Client) -> None:
    procs = client.attach_hosts("workers", 2).spawn_procs()
    mesh: Any = procs.spawn("counters", Counter)
    for stop in (mesh.stop, procs.stop):
        with pytest.raises(TypeError, match="the reason must be a string, not 5"):
            stop(5)
    mesh.stop("\udcff").get(timeout=20)
    assert procs.stop("x" * 1_000_000).get(timeout=20) is None


def test_hosts_that_are_shut_down_reject_requests(client: Client) -> None:
    hosts = client.attach_hosts("workers", 2)
    with pytest.raises(RuntimeError, match="which is a slice of a host mesh"):
        hosts.slice(hosts=0).shutdown()
    hosts.shutdown().get(timeout=20)
    for use in (hosts.spawn_procs, hosts.shutdown, hosts.stop):
        with pytest.raises(RuntimeError, match="HostMesh has already been shut down"):
            use()


def test_meshes_are_async_context_managers(gateway: ScriptedGateway, client: Client) -> None:
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


def test_logging_option_hides_what_a_mesh_prints_and_not_others_of_its_name(
    gateway: ScriptedGateway, settings: ClientSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings) as client:
        hosts = client.attach_hosts("workers", 2)
        loud, quiet = hosts.spawn_procs(name="trainers"), hosts.spawn_procs(name="trainers")
        asyncio.run(quiet.logging_option(stream_to_client=False))
        asyncio.run(loud.logging_option(stream_to_client=True))
        with pytest.raises(ValueError, match="stream_to_client=True"):
            asyncio.run(loud.logging_option(aggregate_window_sec=3))
        session = gateway.session()
        lines = tuple(
            OutputLine(stream="stdout", mesh="trainers", procs=mesh._object, text=text)
            for mesh, text in ((loud, "loud"), (quiet, "quiet"))
        )
        gateway.do(lambda: session.send(Output(lines=lines)))
        hosts.initialized.get(timeout=20)
    assert capsys.readouterr().out == "[trainers] loud\n"


def test_processes_can_be_spawned_on_a_slice_of_hosts(gateway: ScriptedGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: rank
    hosts = client.attach_hosts("workers", 2)
    mesh = hosts.slice(hosts=1).spawn_procs(per_host={"gpus": 3}).spawn("counters", Counter)
    assert isinstance(mesh, ActorMeshProxy)
    assert mesh.add.call(1).get(timeout=20).values() == [0, 1, 2]
    assert gateway.got(SpawnProcs)[-1].hosts.region is not None


def test_hosts_have_monarchs_properties(hosts: HostMeshProxy) -> None:
    assert hosts.slice(hosts=1).region.slice().offset == 1
    assert hosts.region.labels == ["hosts"]
    assert hosts.is_fake_in_process is False
    assert hosts.stream_logs is False


def test_hosts_that_are_about_to_end_are_those_of_the_slice_until_they_are_replaced(
    gateway: ScriptedGateway, hosts: HostMeshProxy
) -> None:
    hosts.initialized.get(timeout=20)
    number, first, second = hosts._object, *gateway.hosts[:2]
    assert hosts.ending == ()
    gateway.session().send(HostEnding(object=number, host=second, reason="drained", seconds=30.0))
    (ending,) = wait_for(lambda: hosts.ending, "the notice")
    assert (ending.name, ending.reason) == (second, "drained")
    assert 0 < ending.seconds_left <= 30
    assert hosts.slice(hosts=0).ending == ()
    assert hosts.slice(hosts=1).ending == (ending,)
    assert hosts._client.objects.host_restarts == {}
    replacement = Host(name=second, address="tcp://10.0.0.9:1")  # at its old address, it could not be used
    gateway.session().send(HostsAttached(object=number, hosts=(Host(name=first), replacement)))
    wait_for(lambda: not hosts.ending, "the replacement")
    assert hosts._client.objects.host_restarts == {"workers": 1}


def test_hosts_whose_end_is_withdrawn_have_not_restarted(gateway: ScriptedGateway, hosts: HostMeshProxy) -> None:
    hosts.initialized.get(timeout=20)
    remote = hosts._owned.remote
    gateway.session().send(HostEnding(object=hosts._object, host=gateway.hosts[0], reason="its limit", seconds=30.0))
    wait_for(lambda: hosts.ending, "the notice")
    gateway.session().send(HostsAttached(object=hosts._object, hosts=remote.hosts))
    wait_for(lambda: not hosts.ending, "the withdrawal")
    assert hosts._client.objects.host_restarts == {}
