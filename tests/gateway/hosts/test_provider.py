from __future__ import annotations

import asyncio

import pytest

from meshgate_gateway.hosts.provider import CombinedHosts, HostsUnavailable, StaticHosts


def test_static_hosts_are_named_by_rank() -> None:
    hosts = StaticHosts({"workers": ["tcp://a:1", "tcp://b:1"]})
    assert hosts.meshes() == {"workers": 2}
    found = asyncio.run(hosts.hosts("workers"))
    assert [(host.name, host.address) for host in found] == [("workers-0", "tcp://a:1"), ("workers-1", "tcp://b:1")]
    assert hosts.present("workers") == dict(enumerate(found))


def test_a_static_host_may_have_an_identity() -> None:
    hosts = StaticHosts({"workers": ["a-uuid@ipc:///x", "tcp://10.0.0.1:1@tcp://0.0.0.0:1"]})
    found = [(host.identity, host.address) for host in hosts.present("workers").values()]
    assert found == [("a-uuid", "ipc:///x"), ("", "tcp://10.0.0.1:1@tcp://0.0.0.0:1")]


def test_combined_hosts_have_the_meshes_of_all_providers() -> None:
    hosts = CombinedHosts([StaticHosts({"a": ["ipc://1"]}), StaticHosts({"b": ["ipc://2", "ipc://3"]})])
    assert hosts.meshes() == {"a": 1, "b": 2}
    assert [host.address for host in asyncio.run(hosts.hosts("b"))] == ["ipc://2", "ipc://3"]
    assert [host.address for host in hosts.present("a").values()] == ["ipc://1"]
    assert hosts.present("c") == {}
    assert not hosts.all_lost()


def test_all_hosts_are_lost_if_those_of_every_provider_are_that_has_any() -> None:
    class Lost(StaticHosts):
        def all_lost(self) -> bool:
            return True

    assert CombinedHosts([StaticHosts({}), Lost({"a": ["ipc://1"]})]).all_lost()  # as in each gateway of a Slurm job
    assert not CombinedHosts([StaticHosts({"b": ["ipc://2"]}), Lost({"a": ["ipc://1"]})]).all_lost()


def test_an_unknown_mesh_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(HostsUnavailable, match=r"no mesh 'c'; its meshes: a, b"):
        asyncio.run(CombinedHosts([StaticHosts({"b": [], "a": []})]).hosts("c"))
    with pytest.raises(HostsUnavailable, match="its meshes: none"):
        asyncio.run(CombinedHosts([]).hosts("c"))
