from __future__ import annotations

import asyncio

import pytest

from meshgate_gateway.hosts import Hosts, HostsUnavailable, StaticHosts


def test_hosts_that_run_already_are_named_by_their_rank() -> None:
    hosts = StaticHosts({"workers": ["tcp://a:1", "tcp://b:1"]})
    assert hosts.meshes() == {"workers": 2}
    found = asyncio.run(hosts.hosts("workers"))
    assert [(host.name, host.address) for host in found] == [("workers-0", "tcp://a:1"), ("workers-1", "tcp://b:1")]
    assert hosts.present("workers") == found


def test_the_meshes_of_all_providers_are_one_table() -> None:
    hosts = Hosts([StaticHosts({"a": ["ipc://1"]}), StaticHosts({"b": ["ipc://2", "ipc://3"]})])
    assert hosts.meshes() == {"a": 1, "b": 2}
    assert [host.address for host in asyncio.run(hosts.hosts("b"))] == ["ipc://2", "ipc://3"]
    assert [host.address for host in hosts.present("a")] == ["ipc://1"]
    assert hosts.present("c") == ()


def test_a_mesh_that_is_not_there_is_an_error_that_names_the_others() -> None:
    with pytest.raises(HostsUnavailable, match=r"no mesh 'c'; its meshes: a, b"):
        asyncio.run(Hosts([StaticHosts({"b": [], "a": []})]).hosts("c"))
    with pytest.raises(HostsUnavailable, match="its meshes: none"):
        asyncio.run(Hosts([]).hosts("c"))
