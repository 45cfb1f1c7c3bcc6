"""Problems with a kubeconfig, an API server, permissions and admission, each injected into a real file or a local
server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from meshgate import Compute
from meshgate.doctor.checks import Finding, check_cluster, check_file_watches
from meshgate.progress import Block
from meshgate_kubernetes.errors import Unreachable
from tests.clusters.kubernetes.objects import node
from tests.ports import closed_port

RULES = [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}]


class Server(ThreadingHTTPServer):
    """An API server that knows reviews, lists, and dry runs. ``status`` is that of all answers; without ``rules``
    nothing is allowed. ``rejected``: what it answers to a dry run, by the plural of the kind; ``listed``: what exists;
    ``created``: the kinds of what it was asked to create for good."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 201
        self.rules: list[dict[str, Any]] = RULES
        self.page: bytes | None = None
        self.rejected: dict[str, tuple[int, str]] = {}
        self.listed: dict[str, list[dict[str, Any]]] = {}
        self.created: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, _, query = self.path.partition("?")
        plural, status = path.rpartition("/")[2], self.server.status
        answer = {"status": {"resourceRules": self.server.rules, "allowed": False, "userInfo": {"username": "alice"}}}
        if self.command == "GET":
            answer = {"metadata": {"resourceVersion": "1"}, "items": self.server.listed.get(plural, [])}
        elif "/namespaces/" in path:
            answer = json.loads(sent)
            if "dryRun=All" not in query:
                self.server.created.append(plural)
            if plural in self.server.rejected:
                status, message = self.server.rejected[plural]
                answer = {"kind": "Status", "message": message}
        body = self.server.page or json.dumps(answer).encode()
        self.send_response(status)
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


def test_a_missing_namespace_is_the_only_problem(tmp_path: Path, server: Server) -> None:
    server.rejected["configmaps"] = (404, 'namespaces "team" not found')
    found = only_problem(check_cluster(kubeconfig(tmp_path, url_of(server)), "team"), "namespace")
    assert found.text == f"namespace 'team' does not exist in the cluster at {url_of(server)}"
    assert found.remedy == "create it (`kubectl create namespace team`), or name another with -n"
    assert server.created == []


def test_missing_permissions(tmp_path: Path, server: Server) -> None:
    server.rules = []
    found = only_problem(check_cluster(kubeconfig(tmp_path, url_of(server)), "team"), "permissions")
    assert "create" in found.text
    assert "role `edit` in namespace team" in found.remedy


def test_a_cluster_in_order(tmp_path: Path, server: Server) -> None:
    server.listed["nodes"] = [node(cpu="8", memory="64Gi")]
    findings = list(check_cluster(kubeconfig(tmp_path, url_of(server)), "team"))
    assert [(each.check, each.outcome) for each in findings] == [
        ("kubeconfig", "ok"),
        ("API server", "ok"),
        ("permissions", "ok"),
        ("admission", "ok"),
        ("nodes", "ok"),
    ]
    assert server.created == []


def after_permissions(tmp_path: Path, server: Server, compute: Compute | None = None) -> list[Finding]:
    server.listed.setdefault("nodes", [node("node0", cpu="8", memory="64Gi")])
    found = [*check_cluster(kubeconfig(tmp_path, url_of(server)), "team", compute)][3:]
    assert server.created == []
    return found


def test_a_webhook_that_denies_an_object_is_reported_with_its_message(tmp_path: Path, server: Server) -> None:
    server.rejected["services"] = (403, 'admission webhook "policy.example" denied the request: no owner label')
    admission, nodes = after_permissions(tmp_path, server)
    assert (admission.outcome, nodes.outcome) == ("problem", "ok")
    assert 'admission webhook "policy.example" denied the request: no owner label' in admission.text
    assert "ask the administrator of team" in admission.remedy


def test_a_pod_that_a_limit_range_rejects_is_reported_with_what_sets_it(tmp_path: Path, server: Server) -> None:
    server.rejected["pods"] = (
        403,
        'pods "x" is forbidden: maximum memory usage per Container is 1Gi, but limit is 8Gi',
    )
    texts = [each.text for each in after_permissions(tmp_path, server) if each.outcome == "problem"]
    assert [each.rpartition(". Set ")[2] for each in texts] == ["gateway=Compute(memory=…)", "Compute(memory=…)"]
    assert "HTTP 403" not in texts[0]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, 'pods is forbidden: User "alice" cannot create resource "pods" in API group "" in the namespace "team"'),
        (400, 'admission webhook "policy.example" does not support dry run'),
    ],
    ids=["a user who may not create pods", "a webhook without dry runs"],
)
def test_what_a_dry_run_cannot_ask_is_no_problem(tmp_path: Path, server: Server, status: int, message: str) -> None:
    server.rejected["pods"] = (status, message)
    assert {each.outcome for each in after_permissions(tmp_path, server)} == {"ok"}


def test_a_quota_must_have_enough_for_all_pods(tmp_path: Path, server: Server) -> None:
    hard = {"requests.nvidia.com/gpu": "8", "pods": "9"}
    quota = {"metadata": {"name": "gpus"}, "spec": {"hard": hard}, "status": {"hard": hard, "used": {"pods": "3"}}}
    server.listed["resourcequotas"] = [quota]
    server.listed["nodes"] = [node(cpu="8", memory="64Gi", **{"nvidia.com/gpu": "8"})]
    found = after_permissions(tmp_path, server, Compute(gpus=4, replicas=3))
    assert [each.text for each in found if each.outcome == "problem"] == [
        "quota gpus has 8 of requests.nvidia.com/gpu left, and the job needs 12"
    ]


def test_a_worker_that_fits_on_no_node_is_a_problem_of_those_who_may_see_nodes(tmp_path: Path, server: Server) -> None:
    (_, found) = after_permissions(tmp_path, server, Compute(gpus=2))
    assert (found.check, found.outcome) == ("nodes", "problem")
    assert found.text == "Insufficient nvidia.com/gpu: the pod requests 2, the largest node has 0 (2 short)"


def test_images_that_cannot_be_checked_for_want_of_an_api_server_are_not_the_fault_of_the_job(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("meshgate.doctor.checks.Waiting", lambda text: shown.append(text()) or Block())

    def lose(*_: object) -> dict[str, str]:
        raise Unreachable("it does not respond")

    monkeypatch.setattr("meshgate.doctor.checks.check_pulls", lose)
    found = list(check_cluster(kubeconfig(tmp_path, url_of(server)), "team", images=True))[-1]
    assert (found.check, found.outcome) == ("images", "problem")
    assert "start the VPN" in found.remedy
    assert shown == ["waiting until the cluster has pulled the images"]


def test_a_low_limit_is_named_with_the_command_that_raises_it(tmp_path: Path) -> None:
    (tmp_path / "max_user_watches").write_text("8192\n")
    (tmp_path / "max_user_instances").write_text("128\n")
    low, enough = check_file_watches(tmp_path)
    assert (low.outcome, "max_user_watches is 8192" in low.text) == ("problem", True)
    assert "sysctl fs.inotify.max_user_watches=65536" in low.remedy
    assert enough.outcome == "ok"


def test_other_kernels_have_no_limits(tmp_path: Path) -> None:
    assert list(check_file_watches(tmp_path)) == []
