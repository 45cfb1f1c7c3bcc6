"""The API client against a local HTTP server."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import urllib3
from hypothesis import given
from hypothesis import strategies as st
from urllib3.exceptions import InsecureRequestWarning

from meshgate_kubernetes.api import client
from meshgate_kubernetes.api.client import KINDS, Api, Watch
from meshgate_kubernetes.errors import (
    Conflict,
    Forbidden,
    KubernetesError,
    NoCluster,
    NotFound,
    NotKubernetes,
    Rejected,
    Unauthenticated,
    Unreachable,
    UntrustedCertificate,
)
from tests.certificates import create_certificates

POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": "team"}}
PATH = "/api/v1/namespaces/team/pods"
POD_TLS = {"metadata": {"name": "a"}}


class Server(ThreadingHTTPServer):
    """Records requests and answers them in order from ``responses``: (status, JSON object or lines). ``retry_after``:
    what the first of them say of the next attempt."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.responses: list[tuple[int, Any]] = []
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.tokens: list[str] = []
        self.retry_after: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        query = {key: value for key, (value,) in parse_qs(parts.query).items()}
        self.server.requests.append((self.command, parts.path, query, json.loads(body) if body else None))
        self.server.tokens.append(self.headers.get("Authorization", ""))
        status, response = self.server.responses.pop(0)
        if not status:  # the connection breaks
            self.close_connection = True
            return
        if not isinstance(response, bytes):
            response = json.dumps(response).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(response)))
        if self.server.retry_after and (seconds := self.server.retry_after.pop(0)):
            self.send_header("Retry-After", seconds)
        self.end_headers()
        self.wfile.write(response)

    do_GET = do_POST = do_PATCH = do_DELETE = do

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield server
        server.shutdown()
        serving.join()


@pytest.fixture
def api(server: Server) -> Iterator[Api]:
    tokens = iter(["first", "second", "third"])

    def load(configuration: Any) -> tuple[str, str]:
        configuration.host = server.url
        configuration.api_key = {"authorization": f"Bearer {next(tokens)}"}
        return "", "team"

    api = Api(load, "the test's configuration")
    yield api
    api._pool.clear()


def failure(reason: str, message: str = "because") -> dict[str, object]:
    return {"kind": "Status", "reason": reason, "message": message}


def test_an_object_is_read_by_its_path_and_with_the_token(server: Server, api: Api) -> None:
    server.responses = [(200, POD)]
    assert api.get("Pod", "a", "team") == POD
    assert server.requests == [("GET", f"{PATH}/a", {}, None)]
    assert server.tokens == ["Bearer first"]
    assert (api.namespace, api.host) == ("team", server.url)


def test_listed_objects_have_kind_and_api_version(server: Server, api: Api) -> None:
    listed = {"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "a"}}]}
    server.responses = [(200, listed), (200, listed)]
    assert api.list_objects("Pod", "team", "x=1", "status.phase=Running") == (
        [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}],
        "7",
    )
    api.list_objects("Pod", "")
    selectors = {"labelSelector": "x=1", "fieldSelector": "status.phase=Running"}
    assert server.requests[0][1:3] == (PATH, {**selectors, "limit": "500"})
    assert server.requests[1][1] == "/api/v1/pods"


def test_objects_are_created_and_patched(server: Server, api: Api) -> None:
    server.responses = [(201, POD), (200, POD)]
    api.create(POD)
    api.merge_patch("Pod", "a", "team", {"spec": {}})
    assert server.requests == [
        ("POST", PATH, {"fieldManager": "meshgate"}, POD),
        ("PATCH", f"{PATH}/a", {}, {"spec": {}}),
    ]


def test_deleting_an_object_with_another_uid_raises_not_found(server: Server, api: Api) -> None:
    server.responses = [(200, {}), (409, failure("Conflict"))]
    api.delete("Pod", "a", "team", uid="1", grace=0)
    with pytest.raises(NotFound):
        api.delete("Pod", "a", "team", uid="2")
    assert server.requests[0][3] == {
        "propagationPolicy": "Background",
        "preconditions": {"uid": "1"},
        "gracePeriodSeconds": 0,
    }


def test_credentials_are_reloaded_once_after_a_401(server: Server, api: Api) -> None:
    server.responses = [(401, {}), (200, POD), (401, {}), (401, {})]
    assert api.get("Pod", "a", "team") == POD
    assert server.tokens == ["Bearer first", "Bearer second"]
    with pytest.raises(Unauthenticated, match="does not accept the credentials of the test's configuration"):
        api.get("Pod", "a", "team")


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(client, "time", clock)
    return clock


BUSY = failure("TooManyRequests", "please try again later")


def test_patient_requests_wait_for_a_busy_server(server: Server, api: Api, clock: Clock) -> None:
    server.responses = [(429, BUSY), (503, b"restarting"), (429, BUSY), (201, POD), (429, BUSY)]
    server.retry_after = ["", "", "7", ""]
    with api.patiently():
        with api.patiently():
            pass
        assert api.create(POD) == POD
    assert clock.pauses == [0.2, 0.4, 7]
    assert [request[::3] for request in server.requests] == [("POST", POD)] * 4
    with pytest.raises(Rejected, match=r"please try again later \(HTTP 429 for GET .*overloaded"):
        api.get("Pod", "a", "team")


def test_patient_requests_are_repeated_when_the_connection_breaks(
    server: Server, api: Api, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    server.responses = [(200, POD), (0, None), (0, None), (200, POD), (0, None)]
    with api.patiently():
        api.get("Pod", "a", "team")
        api.delete("Pod", "a", "team")
    assert clock.pauses == [0.2, 0.4]
    assert not caplog.records
    with pytest.raises(Unreachable):
        api.get("Pod", "a", "team")


def test_a_long_wait_for_the_server_is_reported_once(
    server: Server, api: Api, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    server.responses = [*[(429, BUSY)] * 8, (200, POD)]
    with api.patiently():
        api.get("Pod", "a", "team")
    assert [record.getMessage() for record in caplog.records] == [
        f"the API server at {server.url} answers HTTP 429: waiting for up to 177 s"
    ]


def test_a_first_wait_that_is_long_is_reported_before_it(
    server: Server, api: Api, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    server.responses, server.retry_after = [(429, BUSY), (200, POD)], ["60", ""]
    with api.patiently():
        api.get("Pod", "a", "team")
    assert "answers HTTP 429: waiting for up to 180 s" in caplog.text


@pytest.mark.parametrize("method", ["get", "delete"])
def test_the_first_request_waits_for_as_long_as_the_server_asks(
    method: str, server: Server, api: Api, clock: Clock
) -> None:
    server.responses, server.retry_after = [(429, BUSY), (503, BUSY), (200, POD), (429, BUSY)], ["1", "2", "", "1"]
    with api.patiently():
        getattr(api, method)("Pod", "a", "team")
    assert clock.pauses == [1, 2]
    with pytest.raises(Rejected, match="HTTP 429"):
        getattr(api, method)("Pod", "a", "team")


@pytest.mark.parametrize("asked", ["0", "soon", "-1", "Wed, 01 Jan 99999999999999999999 00:00:00 GMT"])
def test_a_server_that_asks_for_no_pause_gets_one(asked: str, server: Server, api: Api, clock: Clock) -> None:
    server.responses, server.retry_after = [(429, BUSY), (429, BUSY), (201, POD)], [asked, asked, ""]
    with api.patiently():
        api.create(POD)
    assert clock.pauses == [0.2, 0.4]


@pytest.mark.parametrize(("status", "error"), [(429, Rejected), (0, Unreachable)])
def test_no_request_is_repeated_once_the_time_is_over(
    status: int,
    error: type[KubernetesError],
    server: Server,
    api: Api,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.responses = [(200, POD), *[(status, BUSY)] * 3]
    api.get("Pod", "a", "team")
    send = api._send

    def send_slowly(*request: Any) -> Any:
        clock.now += 100
        return send(*request)

    monkeypatch.setattr(api, "_send", send_slowly)
    with api.patiently(), pytest.raises(error):
        api.get("Pod", "a", "team")
    assert (len(server.requests), clock.pauses) == (3, [0.2])


def test_a_patient_thread_can_be_impatient_for_a_while(server: Server, api: Api, clock: Clock) -> None:
    server.responses = [(429, BUSY), (429, BUSY), (200, POD)]
    with api.patiently():
        with api.impatiently(), pytest.raises(Rejected, match="HTTP 429"):
            api.get("Pod", "a", "team")
        api.get("Pod", "a", "team")
    assert clock.pauses == [0.2]


def test_a_server_that_has_never_answered_is_not_awaited(server: Server, api: Api, clock: Clock) -> None:
    server.responses = [(0, None)]
    with api.patiently(), pytest.raises(Unreachable):
        api.get("Pod", "a", "team")
    assert clock.pauses == []


def test_the_patience_is_that_of_one_thread_and_ends(server: Server, api: Api, clock: Clock) -> None:
    server.responses = [(429, BUSY)] * 1000
    with api.patiently():
        with ThreadPoolExecutor(1) as threads, pytest.raises(Rejected):
            threads.submit(api.get, "Pod", "a", "team").result()
        assert (len(server.requests), clock.pauses) == (1, [])
        with pytest.raises(Rejected, match="HTTP 429"):
            api.get("Pod", "a", "team")
    assert clock.now == client.PATIENCE
    assert max(clock.pauses) == 5


def test_a_watch_yields_changes_until_the_server_ends_it(server: Server, api: Api) -> None:
    events = [
        {"type": "ADDED", "object": {"metadata": {"name": "a"}}},
        {"type": "BOOKMARK", "object": {}},
        {"type": "DELETED", "object": {"metadata": {"name": "a"}}},
    ]
    server.responses = [(200, "".join(json.dumps(event) + "\n" for event in events).encode())]
    watch = api.watch("Pod", "team", "x=1", "7")
    assert [(change, obj["kind"], obj["metadata"]["name"]) for change, obj in watch] == [
        ("ADDED", "Pod", "a"),
        ("DELETED", "Pod", "a"),
    ]
    assert server.requests[0][2] == {
        "labelSelector": "x=1",
        "watch": "true",
        "resourceVersion": "7",
        "allowWatchBookmarks": "true",
    }


def test_a_long_list_is_read_in_pages(server: Server, api: Api) -> None:
    pages = [{"metadata": {"resourceVersion": "7", "continue": "more"}, "items": [{"metadata": {"name": "a"}}]}]
    pages += [{"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "b"}}]}]
    server.responses = [(200, page) for page in pages]
    found, version = api.list_objects("Pod", "team", "x=1")
    assert ([each["metadata"]["name"] for each in found], version) == (["a", "b"], "7")
    assert server.requests[1][2] == {"labelSelector": "x=1", "limit": "500", "continue": "more"}


def test_a_watch_continues_from_its_last_change_or_bookmark(server: Server, api: Api) -> None:
    events = [
        {"type": "ADDED", "object": {"metadata": {"name": "a", "resourceVersion": "8"}}},
        {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "12"}}},
    ]
    server.responses = [(200, "".join(json.dumps(event) + "\n" for event in events).encode())]
    watch = api.watch("Pod", "team", "x=1", "7")
    next(watch)
    assert watch.resource_version == "8"
    assert list(watch) == []
    assert watch.resource_version == "12"


def test_a_watch_of_an_expired_version_raises_conflict(server: Server, api: Api) -> None:
    expired = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
    server.responses = [(200, json.dumps(expired).encode() + b"\n")]
    with pytest.raises(Conflict, match="too old resource version"):
        next(api.watch("Pod", "team", "", "7"))


def test_the_log_of_a_container_is_text(server: Server, api: Api) -> None:
    server.responses = [(200, b"one\ntw\xff\n")]
    assert api.read_log("a", "team", "worker", lines=2, previous=True) == "one\ntw�\n"
    assert server.requests[0][1:3] == (f"{PATH}/a/log", {"container": "worker", "tailLines": "2", "previous": "true"})


@pytest.mark.parametrize(
    ("response", "serves"),
    [
        ((200, {"resources": [{"kind": "MonarchMesh"}]}), True),
        ((200, {"resources": [{"kind": "Other"}]}), False),
        ((404, failure("NotFound")), False),
    ],
)
def test_whether_a_kind_is_served(server: Server, api: Api, response: tuple[int, Any], serves: bool) -> None:
    server.responses = [response]
    assert api.serves("MonarchMesh") is serves
    assert server.requests[0][1] == "/apis/monarch.pytorch.org/v1alpha1"


def test_reviews_of_users_and_permissions(server: Server, api: Api) -> None:
    user = {"username": "alice", "groups": ["dev"]}
    server.responses = [
        (201, {"status": {"authenticated": True, "user": user}}),
        (201, {"status": {"authenticated": False}}),
        (201, {"status": {"allowed": True}}),
        (201, {"status": {}}),
        (201, {"status": {"resourceRules": [{"verbs": ["get"]}]}}),
    ]
    assert api.review_token("token") == user
    assert api.review_token("expired") is None
    assert api.is_user_allowed(user, {"verb": "get"})
    assert not api.is_allowed({"verb": "get"})
    assert api.list_rules("team") == [{"verbs": ["get"]}]
    assert [path.rpartition("/")[2] for _, path, _, _ in server.requests] == [
        "tokenreviews", "tokenreviews", "subjectaccessreviews", "selfsubjectaccessreviews", "selfsubjectrulesreviews",
    ]  # fmt: skip


def test_the_denied_user_is_read_from_a_dry_run(server: Server, api: Api) -> None:
    message = 'pods is forbidden: User "bob" cannot create resource "pods" in API group "" in the namespace "team"'
    server.responses = [(403, failure("Forbidden", message)), (200, {})]
    assert api.denied_user("create", "Pod", "team") == "bob"
    assert server.requests[0][:3] == ("POST", PATH, {"dryRun": "All"})
    assert api.denied_user("create", "Pod", "team") == ""


def test_a_forbidden_request_raises_with_the_missing_permission(server: Server, api: Api) -> None:
    message = 'pods "a" is forbidden: User "bob" cannot get resource "pods" in API group "" in the namespace "team"'
    server.responses = [(403, failure("Forbidden", message))]
    with pytest.raises(Forbidden, match="bob may not get pods in namespace 'team'"):
        api.get("Pod", "a", "team")


def test_an_unreachable_server_is_reported_with_what_to_check(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_CONNECT_TIMEOUT", 1.0)

    def load(configuration: Any) -> tuple[str, str]:
        configuration.host = "http://127.0.0.1:1"
        return "", ""

    with pytest.raises(Unreachable, match=r"at http://127\.0\.0\.1:1 \(the test\) does not respond: .*VPN, proxy"):
        Api(load, "the test").get("Pod", "a", "team")


def test_a_port_forward_has_a_websocket_url_and_the_token(server: Server, api: Api) -> None:
    request = api.port_forward("a", "team", 8650)
    assert request.url == f"ws://{server.url.removeprefix('http://')}{PATH}/a/portforward?ports=8650"
    assert request.headers == {"Authorization": "Bearer first"}
    assert request.ssl is None


def test_a_server_that_is_not_kubernetes_is_named(server: Server, api: Api) -> None:
    server.responses = [(404, b"404 page not found\n"), (404, b"404 page not found\n"), (404, failure("NotFound"))]
    with pytest.raises(NotKubernetes, match=r"is not a Kubernetes API server: it responds to GET .*/pods/a with 404"):
        api.get("Pod", "a", "team")
    assert not api.serves("MonarchMesh")  # an API server responds with text for a group that is not installed
    with pytest.raises(NotFound, match="because"):
        api.get("Pod", "a", "team")


def test_an_answer_other_than_json_is_not_from_kubernetes(server: Server, api: Api) -> None:
    server.responses = [(200, b"<html>welcome</html>")]
    with pytest.raises(NotKubernetes, match=r"its answer to GET .*/pods/a is no JSON"):
        api.get("Pod", "a", "team")


@pytest.mark.parametrize(
    ("kind", "path", "resource"),
    [
        ("Pod", "/api/v1/namespaces/team/pods/a", "pods"),
        ("StatefulSet", "/apis/apps/v1/namespaces/team/statefulsets/a", "statefulsets.apps"),
        ("Node", "/api/v1/nodes/a", "nodes"),
    ],
)
def test_the_path_of_an_object(kind: str, path: str, resource: str) -> None:
    assert KINDS[kind].path("team", "a") == path
    assert KINDS[kind].resource == resource


def test_the_path_of_the_objects_of_all_namespaces() -> None:
    assert KINDS["StatefulSet"].path("") == "/apis/apps/v1/statefulsets"


def test_names_cannot_change_the_path() -> None:
    assert KINDS["Pod"].path("a/b", "../c") == "/api/v1/namespaces/a%2Fb/pods/..%2Fc"


class _HandlerOfTls(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(POD_TLS).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None: ...  # clients that reject the certificate


@pytest.fixture(scope="module")
def server_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of an HTTPS server, and the directory of its certificates."""
    directory = tmp_path_factory.mktemp("certificates")
    create_certificates(directory, "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "server.crt", directory / "server.key")
    with _Server(("127.0.0.1", 0), _HandlerOfTls) as server_tls:
        server_tls.socket = context.wrap_socket(server_tls.socket, server_side=True, do_handshake_on_connect=False)
        serving = threading.Thread(target=server_tls.serve_forever, args=(0.01,))
        serving.start()
        yield f"https://127.0.0.1:{server_tls.server_address[1]}", directory
        server_tls.shutdown()
        serving.join()


@pytest.fixture(autouse=True)
def _strict_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of Python 3.13 and later."""
    create = ssl.create_default_context

    def create_strict(*args: Any, **options: Any) -> ssl.SSLContext:
        context = create(*args, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", create_strict)


def api_of(url: str, ca: Path | None, **settings: Any) -> Api:
    def load(configuration: Any) -> tuple[str, str]:
        configuration.host = url
        configuration.ssl_ca_cert = str(ca) if ca is not None else None
        for name, value in settings.items():
            setattr(configuration, name, value)
        return "", "team"

    return Api(load, "the test's kubeconfig")


def test_requests_and_port_forwards_accept_a_cluster_ca_without_key_usage(server_tls: tuple[str, Path]) -> None:
    url, directory = server_tls
    api = api_of(url, directory / "ca.crt")
    assert api.get("Pod", "a", "team") == POD_TLS
    api._pool.clear()
    context = api.port_forward("a", "team", 8650).ssl
    assert context is not None
    host, port = url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain, server_hostname=host) as tls:
        assert tls.version()


def test_connections_do_not_change_the_context_that_they_share(
    server_tls: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, directory = server_tls
    certificate = {"cert_file": str(directory / "server.crt"), "key_file": str(directory / "server.key")}
    api = api_of(url, directory / "ca.crt", **certificate)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("other threads may be opening connections with this context")

    for name in ("load_verify_locations", "load_cert_chain"):
        monkeypatch.setattr(ssl.SSLContext, name, refuse)
    assert api.get("Pod", "a", "team") == POD_TLS
    api._pool.clear()


def test_the_cas_of_the_system_are_still_checked_strictly(server_tls: tuple[str, Path]) -> None:
    context = api_of(server_tls[0], None)._ssl
    assert context is not None
    assert context.verify_flags & ssl.VERIFY_X509_STRICT


def test_another_ca_is_reported_as_such_and_not_as_a_network_problem(
    server_tls: tuple[str, Path], tmp_path: Path
) -> None:
    create_certificates(tmp_path, "127.0.0.1")
    api = api_of(server_tls[0], tmp_path / "ca.crt")
    with pytest.raises(UntrustedCertificate, match=r"is not trusted: .*certificate.*the test's kubeconfig") as caught:
        api.get("Pod", "a", "team")
    assert "VPN" not in str(caught.value)
    api._pool.clear()


def test_verification_can_be_switched_off_in_the_kubeconfig(server_tls: tuple[str, Path], tmp_path: Path) -> None:
    create_certificates(tmp_path, "127.0.0.1")
    api = api_of(server_tls[0], tmp_path / "ca.crt", verify_ssl=False)
    with pytest.warns(InsecureRequestWarning):
        assert api.get("Pod", "a", "team") == POD_TLS
    api._pool.clear()


def test_a_file_that_is_not_a_certificate_is_reported(server_tls: tuple[str, Path], tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("none")
    with pytest.raises(NoCluster, match="cannot use the certificates of the test's kubeconfig"):
        api_of(server_tls[0], tmp_path / "ca.crt")


class Response:
    """``error`` is raised once the pieces are read."""

    def __init__(self, pieces: list[bytes], error: Exception | None = None) -> None:
        self.pieces, self.error = pieces, error
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def stream(self, size: int, decode_content: bool) -> Iterator[bytes]:
        yield from self.pieces
        if self.error is not None:
            raise self.error


def line(kind: str, version: str, **facts: Any) -> bytes:
    return json.dumps({"type": kind, "object": {"metadata": {"resourceVersion": version}, **facts}}).encode() + b"\n"


def watch(*pieces: bytes, error: Exception | None = None) -> Watch:
    return Watch(Response(list(pieces), error), KINDS["Pod"])  # type: ignore[arg-type]


CHANGES = line("ADDED", "1", spec={"nodeName": "n"}) + line("BOOKMARK", "7") + line("DELETED", "9")


@given(st.lists(st.integers(0, len(CHANGES)), max_size=6))
def test_changes_arrive_whole_in_whatever_pieces(cuts: list[int]) -> None:
    ends = sorted({0, *cuts, len(CHANGES)})
    watched = watch(*(CHANGES[start:end] for start, end in pairwise(ends)))
    changes = list(watched)
    assert [(change, each["kind"], each["metadata"]["resourceVersion"]) for change, each in changes] == [
        ("ADDED", "Pod", "1"),
        ("DELETED", "Pod", "9"),
    ]
    assert changes[0][1]["spec"] == {"nodeName": "n"}


def test_a_bookmark_advances_the_version_to_continue_from() -> None:
    watched = watch(line("ADDED", "1") + line("BOOKMARK", "7"))
    next(watched)
    assert watched.resource_version == "1"
    assert list(watched) == []
    assert watched.resource_version == "7"


def test_a_version_that_is_too_old_is_a_conflict() -> None:
    with pytest.raises(Conflict, match="too old resource version"):
        next(watch(line("ERROR", "", code=410, message="too old resource version: 1 (9)")))


def test_a_connection_is_closed_as_soon_as_its_watch_has_failed() -> None:
    response = Response([line("ERROR", "", code=410, message="too old resource version: 1 (9)"), line("ADDED", "2")])
    with pytest.raises(Conflict) as caught:
        next(Watch(response, KINDS["Pod"]))  # type: ignore[arg-type]
    assert response.closed, caught  # although the error still refers to the watch


def test_another_failure_of_the_server_is_no_conflict() -> None:
    with pytest.raises(KubernetesError, match="the watch of pods failed: etcdserver: request timed out") as caught:
        next(watch(line("ERROR", "", code=500, message="etcdserver: request timed out")))
    assert not isinstance(caught.value, Conflict)


@pytest.mark.parametrize("error", [urllib3.exceptions.ProtocolError("broken"), OSError("reset")])
def test_a_broken_connection_ends_the_watch(error: Exception) -> None:
    assert [change for change, _ in watch(line("ADDED", "1"), b'{"type": "MODI', error=error)] == ["ADDED"]
