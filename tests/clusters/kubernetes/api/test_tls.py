"""TLS towards an API server whose CA has no key usage extension, with a Python that is strict about it."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from urllib3.exceptions import InsecureRequestWarning

from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import NoCluster, UntrustedCertificate
from tests.certificates import create_certificates

POD = {"metadata": {"name": "a"}}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(POD).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None: ...  # clients that reject the certificate


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of an HTTPS server, and the directory of its certificates."""
    directory = tmp_path_factory.mktemp("certificates")
    create_certificates(directory, "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "server.crt", directory / "server.key")
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield f"https://127.0.0.1:{server.server_address[1]}", directory
        server.shutdown()
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
    def load(configuration: Any) -> str:
        configuration.host = url
        configuration.ssl_ca_cert = str(ca) if ca is not None else None
        for name, value in settings.items():
            setattr(configuration, name, value)
        return "team"

    return Api(load, "the test's kubeconfig")


def test_requests_and_port_forwards_accept_a_cluster_ca_without_key_usage(server: tuple[str, Path]) -> None:
    url, directory = server
    api = api_of(url, directory / "ca.crt")
    assert api.get("Pod", "a", "team") == POD
    api._pool.clear()
    context = api.port_forward("a", "team", 8650).ssl
    assert context is not None
    host, port = url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain, server_hostname=host) as tls:
        assert tls.version()


def test_connections_do_not_change_the_context_that_they_share(
    server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, directory = server
    certificate = {"cert_file": str(directory / "server.crt"), "key_file": str(directory / "server.key")}
    api = api_of(url, directory / "ca.crt", **certificate)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("other threads may be opening connections with this context")

    for name in ("load_verify_locations", "load_cert_chain"):
        monkeypatch.setattr(ssl.SSLContext, name, refuse)
    assert api.get("Pod", "a", "team") == POD
    api._pool.clear()


def test_the_cas_of_the_system_are_still_checked_strictly(server: tuple[str, Path]) -> None:
    context = api_of(server[0], None)._ssl
    assert context is not None
    assert context.verify_flags & ssl.VERIFY_X509_STRICT


def test_another_ca_is_reported_as_such_and_not_as_a_network_problem(server: tuple[str, Path], tmp_path: Path) -> None:
    create_certificates(tmp_path, "127.0.0.1")
    api = api_of(server[0], tmp_path / "ca.crt")
    with pytest.raises(UntrustedCertificate, match=r"is not trusted: .*certificate.*the test's kubeconfig") as caught:
        api.get("Pod", "a", "team")
    assert "VPN" not in str(caught.value)
    api._pool.clear()


def test_verification_can_be_switched_off_in_the_kubeconfig(server: tuple[str, Path], tmp_path: Path) -> None:
    create_certificates(tmp_path, "127.0.0.1")
    api = api_of(server[0], tmp_path / "ca.crt", verify_ssl=False)
    with pytest.warns(InsecureRequestWarning):
        assert api.get("Pod", "a", "team") == POD
    api._pool.clear()


def test_a_file_that_is_not_a_certificate_is_reported(server: tuple[str, Path], tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("none")
    with pytest.raises(NoCluster, match="cannot use the certificates of the test's kubeconfig"):
        api_of(server[0], tmp_path / "ca.crt")
