"""Sessions through the proxies of docs/ingress.md, and the objects that the page shows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshgate import Client, Compute, Future, KubernetesJob, UrlDialer
from meshgate.errors import ConnectionFailedError
from tests.certificates import create_ca, sign
from tests.kubernetes.actors import Counter
from tests.kubernetes.cluster import Kubectl
from tests.kubernetes.network import local_port
from tests.kubernetes.proxies import CLIENTS, PROXIES, block, proxy
from tests.waiting import wait_for


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


@pytest.mark.parametrize("name", CLIENTS)
def test_a_session_presents_its_client_certificate_and_continues_with_a_renewed_one(
    name: str, gateway: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, token = gateway
    cert, key, payload = tmp_path / "client.crt", tmp_path / "client.key", os.urandom(1 << 10)
    with proxy(name, tmp_path, "127.0.0.1", port, verifies_clients=True) as running:
        monkeypatch.setenv("MESHGATE_CA", str(running.ca))
        with pytest.raises(ConnectionFailedError, match="set MESHGATE_CLIENT_CERT and MESHGATE_CLIENT_KEY"):
            Client.connect(UrlDialer(running.url, token))
        renew(tmp_path / "first", cert, key)
        monkeypatch.setenv("MESHGATE_CLIENT_CERT", str(cert))
        monkeypatch.setenv("MESHGATE_CLIENT_KEY", str(key))
        with Client.connect(UrlDialer(running.url, token)) as client:
            counters = client.attach_hosts("workers", 1).spawn_procs().spawn("counters", Counter)
            assert counters.add.call_one(0, payload).get(timeout=60) == payload
            running.cut()
            calls = [counters.add.call_one(1, payload)]
            assert calls[0].get(timeout=60) == payload
            other = tmp_path / "other"
            other.mkdir()
            create_ca(other, "next CA of the clients")
            sign(other, "first")
            running.accept_clients_of(other)

            def refused() -> bool:  # the last connections of the old configuration may end a moment later
                calls.append(counters.add.call_one(len(calls) + 1, payload))
                return "certificate" in why_it_waits(calls[-1])

            wait_for(refused, "the refusal to be reported")
            renew(other / "first", cert, key)
            assert calls[-1].get(timeout=60) == payload
            assert counters.all.call_one().get(timeout=60) == list(range(len(calls) + 1))


def why_it_waits(call: Future[Any]) -> str:
    try:
        call.get(timeout=0.1)
    except TimeoutError as error:
        return str(error)
    return ""


def renew(source: Path, cert: Path, key: Path) -> None:
    shutil.copy(source.with_suffix(".key"), key)
    shutil.copy(source.with_suffix(".crt"), cert)


def test_the_documented_ingress_is_one_that_the_cluster_accepts(kubectl: Kubectl) -> None:
    text = block("kubernetes.md", "ingress.yaml")
    assert kubectl("apply", "--dry-run=server", "-f", "-", "-o", "name", stdin=text).endswith("/trainer")
