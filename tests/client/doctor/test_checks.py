"""Problems with a kubeconfig, an API server and permissions, each injected into a real file or a local server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from meshgate.doctor.checks import Finding, check_cluster, check_file_watches
from tests.ports import closed_port

RULES = [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}]


class Server(ThreadingHTTPServer):
    """An API server that knows reviews. ``status`` is that of all answers; without ``rules`` nothing is allowed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 201
        self.rules: list[dict[str, Any]] = RULES
        self.page: bytes | None = None


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = {"status": {"resourceRules": self.server.rules, "allowed": False, "userInfo": {"username": "alice"}}}
        body = self.server.page or json.dumps(answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def kubeconfig(directory: Path, url: str, user: str = "{token: secret}") -> str:
    path = directory / "kubeconfig"
    path.write_text(
        "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], "
        f'clusters: [{{name: c, cluster: {{server: "{url}"}}}}], users: [{{name: u, user: {user}}}]}}'
    )
    return str(path)


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def only_problem(findings: Iterator[Finding], check: str) -> Finding:
    *good, last = findings
    assert [each.outcome for each in good] == ["ok"] * len(good)
    assert (last.check, last.outcome) == (check, "problem")
    return last


def test_no_kubeconfig(tmp_path: Path) -> None:
    found = only_problem(check_cluster(str(tmp_path / "none"), "team"), "kubeconfig")
    assert "no such file" in found.text
    assert "set KUBECONFIG" in found.remedy


def test_a_file_that_is_not_a_kubeconfig(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("just words")
    found = only_problem(check_cluster(str(tmp_path / "words"), "team"), "kubeconfig")
    assert "kubectl config view" in found.remedy


def test_a_login_that_has_expired(tmp_path: Path, server: Server) -> None:
    plugin = '{exec: {apiVersion: client.authentication.k8s.io/v1, command: sh, args: ["-c", "exit 7"]}}'
    found = only_problem(check_cluster(kubeconfig(tmp_path, url_of(server), plugin), "team"), "kubeconfig")
    assert "log in to the cluster again" in found.remedy


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    with closed_port() as port:
        found = only_problem(check_cluster(kubeconfig(tmp_path, f"http://127.0.0.1:{port}"), "team"), "API server")
    assert "start the VPN" in found.remedy


def test_a_server_that_is_not_kubernetes(tmp_path: Path, server: Server) -> None:
    server.status, server.page = 200, b"<html>welcome</html>"
    found = only_problem(check_cluster(kubeconfig(tmp_path, url_of(server)), "team"), "API server")
    assert "another service" in found.remedy


def test_credentials_that_the_server_rejects(tmp_path: Path, server: Server) -> None:
    server.status = 401
    found = only_problem(check_cluster(kubeconfig(tmp_path, url_of(server)), "team"), "API server")
    assert "log in to the cluster again" in found.remedy


def test_missing_permissions(tmp_path: Path, server: Server) -> None:
    server.rules = []
    found = only_problem(check_cluster(kubeconfig(tmp_path, url_of(server)), "team"), "permissions")
    assert "create" in found.text
    assert "role `edit` in namespace team" in found.remedy


def test_a_cluster_in_order(tmp_path: Path, server: Server) -> None:
    findings = list(check_cluster(kubeconfig(tmp_path, url_of(server)), "team"))
    assert [(each.check, each.outcome) for each in findings] == [
        ("kubeconfig", "ok"),
        ("API server", "ok"),
        ("permissions", "ok"),
    ]


def test_a_low_limit_is_named_with_the_command_that_raises_it(tmp_path: Path) -> None:
    (tmp_path / "max_user_watches").write_text("8192\n")
    (tmp_path / "max_user_instances").write_text("128\n")
    low, enough = check_file_watches(tmp_path)
    assert (low.outcome, "max_user_watches is 8192" in low.text) == ("problem", True)
    assert "sysctl fs.inotify.max_user_watches=65536" in low.remedy
    assert enough.outcome == "ok"


def test_other_kernels_have_no_limits(tmp_path: Path) -> None:
    assert list(check_file_watches(tmp_path)) == []
