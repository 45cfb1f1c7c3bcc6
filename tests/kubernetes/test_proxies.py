"""Sessions through the proxies of docs/ingress.md, and the objects that the page shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshgate import Client, Compute, KubernetesJob, UrlDialer
from tests.kubernetes.actors import Counter
from tests.kubernetes.cluster import Kubectl
from tests.kubernetes.network import local_port
from tests.kubernetes.proxies import PROXIES, block, proxy


@pytest.fixture(scope="module")
def gateway(namespace: str, kubectl: Kubectl) -> Iterator[tuple[int, str]]:
    """The local port of a job's gateway, and its token."""
    with KubernetesJob(compute=Compute(), name="proxied", namespace=namespace) as job:
        job.apply()
        token = kubectl("get", "secret", "proxied-token", "-o", "go-template={{.data.token | base64decode}}")
        with local_port(kubectl, "service/proxied-gateway") as port:
            yield port, token


@pytest.mark.parametrize("name", PROXIES)
def test_a_session_loses_nothing_when_its_proxy_restarts(name: str, gateway: tuple[int, str], tmp_path: Path) -> None:
    port, token = gateway
    payload = os.urandom(1 << 20)
    with (
        proxy(name, tmp_path, "127.0.0.1", port) as running,
        Client.connect(UrlDialer(running.url, token, ca=running.ca)) as client,
    ):
        counters = client.attach_hosts("workers", 1).spawn_procs().spawn("counters", Counter)
        calls = []
        for number in range(12):
            calls.append(counters.add.call_one(number, payload))
            if number % 4 == 2:
                running.cut()
        assert all(call.get(timeout=60) == payload for call in calls)
        assert counters.all.call_one().get(timeout=60) == list(range(12))


def test_the_documented_ingress_is_one_that_the_cluster_accepts(kubectl: Kubectl) -> None:
    text = block("kubernetes.md", "ingress.yaml")
    assert kubectl("apply", "--dry-run=server", "-f", "-", "-o", "name", stdin=text).endswith("/trainer")
