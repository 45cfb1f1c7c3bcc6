"""Credentials are found and renewed as kubectl does it, and what is wrong with them is named."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from meshgate_kubernetes import api
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import NoCluster, OtherCluster, Unauthenticated


def test_an_unusable_configuration_raises_no_cluster(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    with pytest.raises(NoCluster, match=f"cannot use the kubeconfig {path}: no such file"):
        Api.from_kubeconfig(path)
    path.write_text("just words")
    with pytest.raises(NoCluster, match="cannot use the kubeconfig"):
        Api.from_kubeconfig(path)


def test_where_the_kubernetes_package_is_missing_the_ways_without_it_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "meshgate_kubernetes.api.credentials", raising=False)
    monkeypatch.delattr(api, "credentials", raising=False)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(NoCluster, match=r"package kubernetes is not installed here.*gateway_url= or MESHGATE_URL"):
        Api.from_kubeconfig()


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
users:
- name: u
  user:
    exec: {apiVersion: client.authentication.k8s.io/v1, command: sh, args: ["-c", "echo token has expired >&2; exit 7"]}
"""


def test_the_error_of_a_credential_plugin_is_raised_and_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG)
    with pytest.raises(Unauthenticated, match=r"credential plugin .*kubeconfig .* failed: .*7. token has expired"):
        Api.from_kubeconfig(path)
    assert not caplog.records


class Login:
    """An API server, and the kubeconfig of a user whose credential plugin gives ``token``, which expires within
    ``lifetime``. The server accepts ``accepted``."""

    def __init__(self, directory: Path, server: ThreadingHTTPServer) -> None:
        self.path, self._runs, self._credential = (directory / name for name in ("kubeconfig", "runs", "credential"))
        self.accepted = ""
        script = directory / "plugin"
        runs, credential = (shlex.quote(str(path)) for path in (self._runs, self._credential))
        script.write_text(f"#!/bin/sh\necho run >>{runs}\n. {credential}\n")
        script.chmod(0o755)
        user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(script)}}
        text = KUBECONFIG.partition("users:")[0].replace("127.0.0.1:1", f"127.0.0.1:{server.server_port}")
        self.path.write_text(text + f"users: {json.dumps([{'name': 'u', 'user': user}])}\n")

    def give(self, token: str, lifetime: timedelta | None) -> None:
        status = {"token": token}
        if lifetime is not None:
            status["expirationTimestamp"] = f"{datetime.now(timezone.utc) + lifetime:%Y-%m-%dT%H:%M:%SZ}"
        credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
        self._credential.write_text(f"echo '{json.dumps(credential)}'\n")

    def fail(self, reason: str) -> None:
        self._credential.write_text(f"echo '{reason}' >&2\nexit 1\n")

    @property
    def runs(self) -> int:
        return len(self._runs.read_text().splitlines())


@pytest.fixture
def login(tmp_path: Path) -> Iterator[Login]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            accepted = self.headers.get("Authorization") == f"Bearer {login.accepted}"
            body = b'{"metadata": {"name": "a"}}' if accepted else b"{}"
            self.send_response(200 if accepted else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        login = Login(tmp_path, server)
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield login
        server.shutdown()
        serving.join()


def test_a_token_is_renewed_by_the_plugin_before_it_expires_and_not_earlier(login: Login) -> None:
    login.give("first", timedelta(seconds=20))
    login.accepted = "second"
    api = Api.from_kubeconfig(login.path)
    login.give("second", timedelta(hours=1))
    for _ in range(3):
        api.get("Pod", "a", "team")
        assert api.port_forward("a", "team", 1).headers == {"Authorization": "Bearer second"}
    assert login.runs == 2


@pytest.mark.parametrize("lifetime", [None, timedelta(hours=1)])
def test_a_token_that_the_server_rejects_is_renewed_whatever_its_plugin_said(
    login: Login, lifetime: timedelta | None
) -> None:
    login.give("first", lifetime)
    login.accepted = "first"
    api = Api.from_kubeconfig(login.path)
    api.get("Pod", "a", "team")
    login.give("second", lifetime)
    login.accepted = "second"
    api.get("Pod", "a", "team")
    assert api.port_forward("a", "team", 1).headers == {"Authorization": "Bearer second"}
    assert login.runs == 2


def test_a_plugin_that_fails_is_an_error_only_once_its_last_token_is_rejected(
    login: Login, caplog: pytest.LogCaptureFixture
) -> None:
    login.give("first", timedelta(seconds=20))
    login.accepted = "first"
    api = Api.from_kubeconfig(login.path)
    login.fail("the login has expired: run tsh login")
    api.get("Pod", "a", "team")
    login.accepted = "second"
    with pytest.raises(Unauthenticated, match=r"kubeconfig .*kubeconfig .* failed: .*the login has expired: run tsh"):
        api.get("Pod", "a", "team")
    login.give("second", timedelta(seconds=20))
    api.get("Pod", "a", "team")
    assert not caplog.records


def switch_to(path: Path, context: str) -> None:
    """As ``kubectl config use-context``, to a context whose server does not respond."""
    config = yaml.safe_load(path.read_text())
    config["contexts"].append({"name": context, "context": {"cluster": context, "user": "u"}})
    config["clusters"].append({"name": context, "cluster": {"server": "http://127.0.0.1:1"}})
    path.write_text(yaml.safe_dump({**config, "current-context": context}))


def test_a_renewed_token_is_of_the_same_cluster_although_the_user_has_switched_to_another(login: Login) -> None:
    login.give("first", None)
    login.accepted = "first"
    api = Api.from_kubeconfig(login.path)
    api.get("Pod", "a", "team")
    login.give("second", None)
    login.accepted = "second"
    switch_to(login.path, "other")
    api.get("Pod", "a", "team")
    assert api.context == "c"
    assert Api.from_kubeconfig(login.path).context == "other"


def renamed(text: str) -> str:
    """As ``kubectl config rename-context c d``."""
    return text.replace("contexts: [{name: c", "contexts: [{name: d").replace(
        "current-context: c", "current-context: d"
    )


@pytest.mark.parametrize("current", ["gone", "''", "null"])
def test_a_context_is_used_and_renewed_although_the_current_one_is_gone(login: Login, current: str) -> None:
    login.give("first", None)
    login.accepted = "first"
    api = Api.from_kubeconfig(login.path)
    login.path.write_text(login.path.read_text().replace("current-context: c", f"current-context: {current}"))
    assert Api.from_kubeconfig(login.path, "c", api.host).context == "c"
    login.give("second", None)
    login.accepted = "second"
    api.get("Pod", "a", "team")
    login.path.write_text(login.path.read_text().replace(api.host, "http://127.0.0.1:2"))
    with pytest.raises(OtherCluster, match=r"is the cluster at .*:2 now; there is no current context. Restore"):
        Api.from_kubeconfig(login.path, "c", api.host)


def test_a_context_that_was_renamed_is_used_and_renewed_while_it_is_the_current_one(login: Login) -> None:
    login.give("first", None)
    login.accepted = "first"
    api = Api.from_kubeconfig(login.path)
    login.path.write_text(renamed(login.path.read_text()))
    assert Api.from_kubeconfig(login.path, "c", api.host).context == "d"
    login.give("second", None)
    login.accepted = "second"
    api.get("Pod", "a", "team")
    assert api.context == "d"


def test_a_context_that_is_gone_or_leads_elsewhere_is_an_error_that_names_both_clusters(login: Login) -> None:
    login.give("first", None)
    login.accepted = "first"
    api = Api.from_kubeconfig(login.path)
    text = login.path.read_text()
    login.accepted = "second"
    login.path.write_text(text.replace(api.host, "http://127.0.0.1:2"))
    moved = f"context 'c' of the kubeconfig {login.path} was the cluster at {api.host}, and is the cluster at .*:2 now"
    with pytest.raises(OtherCluster, match=moved):
        api.get("Pod", "a", "team")
    login.path.write_text(renamed(text).replace(api.host, "http://127.0.0.1:2"))
    gone = rf"at {api.host}, and is gone; the current context is 'd', of the cluster at .*:2\. Restore the context, or"
    for load in (lambda: api.get("Pod", "a", "team"), lambda: Api.from_kubeconfig(login.path, "c", api.host)):
        with pytest.raises(OtherCluster, match=gone):
            load()
