"""Credentials are found as kubectl finds them, and what is wrong with them is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meshgate_kubernetes import api
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import NoCluster, Unauthenticated


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
