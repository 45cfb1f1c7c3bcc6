from __future__ import annotations

from typing import Any

import pytest

from meshgate.proxies import HostMeshProxy, ProcMeshProxy
from meshgate.proxies.client import Client
from tests.client.counting import Counter


@pytest.fixture
def hosts(client: Client) -> HostMeshProxy:
    return client.attach_hosts("workers", 2)


@pytest.fixture
def procs(hosts: HostMeshProxy) -> ProcMeshProxy:
    return hosts.spawn_procs(per_host={"gpus": 2}, name="trainers")


@pytest.fixture
def mesh(procs: ProcMeshProxy) -> Any:
    return procs.spawn("counters", Counter)
