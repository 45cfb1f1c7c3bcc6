"""Tokens that end during a session: a kubeconfig's plugin renews them for the port-forward, a file
or the same plugin for the gateway."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from meshgate import Compute, KubernetesJob
from meshgate.testing import NetworkProxy
from meshgate_kubernetes.api.client import Api
from tests.kubernetes.actors import Counter
from tests.kubernetes.cluster import Kubectl
from tests.kubernetes.network import local_port
from tests.waiting import wait_for

PLUGIN = """#!/bin/sh
if [ -e {directory}/failure ]; then cat {directory}/failure >&2; exit 1; fi
exec cat {directory}/credential
"""


class Login:
    """A user of the namespace ``kubectl`` with tokens that can end, and a kubeconfig whose plugin gives the latest one.
    It reaches the API server at ``port``."""

    def __init__(self, kubectl: Kubectl, api: Api, directory: Path, port: int) -> None:
        self.kubeconfig, self.token_file = directory / "kubeconfig", directory / "token"
        self.plugin = directory / "plugin"
        self._kubectl, self._api, self._directory = kubectl, api, directory
        self.plugin.write_text(PLUGIN.format(directory=directory))
        self.plugin.chmod(0o755)
        config = json.loads(kubectl("config", "view", "--raw", "--minify", "-o", "json"))
        cluster = config["clusters"][0]["cluster"]
        cluster |= {"server": f"https://127.0.0.1:{port}", "tls-server-name": urlsplit(cluster["server"]).hostname}
        config["users"][0]["user"] = {
            "exec": {
                "apiVersion": "client.authentication.k8s.io/v1",
                "command": str(self.plugin),
                "interactiveMode": "Never",
            }
        }
        self.kubeconfig.write_text(json.dumps(config))

    def renew(self) -> None:
        """The plugin and the file have another token from now on."""
        token = self._kubectl.token_of("laptop")
        self.token_file.write_text(token)
        status = {"token": token, "expirationTimestamp": "2020-01-01T00:00:00Z"}  # each request runs the plugin
        head = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
        (self._directory / "credential").write_text(json.dumps({**head, "status": status}))
        (self._directory / "failure").unlink(missing_ok=True)

    def expire(self, failure: str) -> None:
        """The token ends, and the plugin fails. Returns when the API server rejects the token."""
        (self._directory / "failure").write_text(failure)
        token = self.token_file.read_text()
        claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
        self._kubectl("delete", "secret", claims["kubernetes.io/serviceaccount/secret.name"])
        wait_for(lambda: self._api.review_token(token) is None, "the token to be rejected")


@pytest.fixture
def path(kubectl: Kubectl) -> Iterator[NetworkProxy]:
    """The way to the API server."""
    server = urlsplit(kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}"))
    with NetworkProxy(str(server.hostname), server.port or 443) as proxy:
        yield proxy


@pytest.fixture
def login(job: KubernetesJob, kubectl: Kubectl, api: Api, tmp_path: Path, path: NetworkProxy) -> Iterator[Login]:
    kubectl("create", "serviceaccount", "laptop")
    account = f"--serviceaccount={kubectl.namespace}:laptop"
    kubectl("create", "rolebinding", "laptop", "--clusterrole=edit", account)
    login = Login(kubectl, api, tmp_path, path.port)
    login.renew()
    yield login
    kubectl("delete", "rolebinding/laptop", "serviceaccount/laptop")


@pytest.fixture(scope="module")
def job(namespace: str, kubectl: Kubectl) -> Iterator[KubernetesJob]:
    """Its gateway accepts identities of the cluster."""
    with KubernetesJob(compute=Compute(), name="renewed", namespace=namespace) as job:
        job.apply()
        binding, account = f"meshgate-test-{namespace}-renewed", f"--serviceaccount={namespace}:renewed-gateway"
        kubectl("create", "clusterrolebinding", binding, "--clusterrole=system:auth-delegator", account)
        yield job
        kubectl("delete", "clusterrolebinding", binding)


def check_renewal(driver: KubernetesJob, login: Login, path: NetworkProxy, reason: str) -> None:
    """The token ends, and with it the connection of a session. The session waits, with this reason, for the next."""
    counters = driver.state(cached_path=None).workers.spawn_procs().spawn("counters", Counter)
    counters.add.call_one(0, b"").get(timeout=60)
    login.expire("the login has ended: run tsh login")
    path.cut()
    call = counters.add.call_one(1, b"")
    wait_for(lambda: reason in why_it_waits(call), "the reason why there is no connection")
    login.renew()
    call.get(timeout=60)
    assert counters.all.call_one().get(timeout=60) == [0, 1]
    assert driver._client is not None
    driver._client.close()


def why_it_waits(call: Any) -> str:
    with pytest.raises(TimeoutError) as caught:
        call.get(timeout=0.1)
    return str(caught.value)


def test_a_port_forward_uses_the_token_that_the_plugin_of_the_kubeconfig_has_renewed(
    job: KubernetesJob, login: Login, path: NetworkProxy
) -> None:
    driver = KubernetesJob(name="renewed", namespace=job.namespace, kubeconfig=login.kubeconfig)
    check_renewal(driver, login, path, "the login has ended: run tsh login")


@pytest.mark.parametrize("way", ["file", "command"])
def test_a_gateway_that_checks_identities_gets_the_token_that_is_in_the_file_or_that_the_command_prints(
    way: str, job: KubernetesJob, kubectl: Kubectl, login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_port(kubectl, "service/renewed-gateway") as port, NetworkProxy("127.0.0.1", port) as path:
        monkeypatch.setenv("MESHGATE_URL", f"ws://127.0.0.1:{path.port}")
        place = login.token_file if way == "file" else login.plugin
        monkeypatch.setenv(f"MESHGATE_TOKEN_{way.upper()}", str(place))
        driver = KubernetesJob(name="renewed", namespace=job.namespace)
        reason = "HTTP 401" if way == "file" else "the login has ended: run tsh login"
        check_renewal(driver, login, path, reason)
