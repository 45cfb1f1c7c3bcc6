"""An ingress with TLS: whom the client trusts, what it presents, and what it says when that is not accepted."""

from __future__ import annotations

import asyncio
import base64
import shutil
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias
from urllib.error import URLError

import pytest

from meshgate.errors import ConnectionFailedError
from meshgate.jobs.kubernetes.remote_gateway import RemoteGateway
from meshgate.session.certificates import CA, CERT, KEY, Certificates
from meshgate.session.dialing import UrlDialer
from meshgate.session.gateway_client import request_json
from meshgate.session.settings import ClientSettings
from meshgate.session.transport.reconnect import Reconnector
from meshgate_wire import Limits
from tests.certificates import create_ca, create_certificates, sign
from tests.ports import closed_port

Connect: TypeAlias = Callable[[str], object]
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the certificates of a server and of its clients; ``other`` has those of another CA."""
    directory = tmp_path_factory.mktemp("certificates")
    create_certificates(directory, HOST)
    (directory / "other").mkdir()
    create_ca(directory / "other", "other CA")
    for each in (directory, directory / "other"):
        sign(each, "alice")
    sign(directory, "expired", days=-1)
    sign(directory, "past", f"subjectAltName=IP:{HOST}", days=-1)
    sign(directory, "misnamed", "subjectAltName=DNS:gateway.example")
    return directory


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CA, CERT, KEY):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def serving(certificate: Path, clients: Path | None = None, **settings: Any) -> Iterator[str]:
    """The URL of a server with this certificate that answers everything with 200, as no gateway would. It accepts
    only clients with a certificate of the CA ``clients``, if that is given."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.with_suffix(".crt"), certificate.with_suffix(".key"))
    for name, value in settings.items():
        setattr(context, name, value)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients)
    listener, ending = socket.create_server((HOST, 0)), threading.Event()

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            if ending.is_set():
                return connection.close()
            with connection, suppress(OSError), context.wrap_socket(connection, server_side=True) as encrypted:
                encrypted.recv(4096)
                encrypted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"wss://{HOST}:{listener.getsockname()[1]}"
    finally:
        ending.set()
        socket.create_connection(listener.getsockname()).close()
        thread.join()
        listener.close()


def by_request(url: str) -> None:
    request_json(UrlDialer(url, "t"), "/v1/status")


def by_session(url: str) -> None:
    asyncio.run(Reconnector(UrlDialer(url, "t"), ClientSettings(), "abc", None, Limits()).connect())  # type: ignore[arg-type]


def by_list(url: str) -> None:
    RemoteGateway(url, "t").list_jobs()


def by_lookup(url: str) -> None:
    RemoteGateway(url, "t").find_job(None, "team")


every_client = pytest.mark.parametrize("connect", [by_request, by_session, by_list, by_lookup])
REACHED = "is not a meshgate gateway"


@every_client
def test_a_private_ca_is_trusted_if_a_variable_names_it(
    connect: Connect, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Later versions reject a CA without key usage, unless this client's own variable names it.
    for variable in (CA, "SSL_CERT_FILE") if sys.version_info < (3, 13) else (CA,):
        with monkeypatch.context() as patch, serving(made / "server") as url:
            patch.setenv(variable, str(made / "ca.crt"))
            with pytest.raises(ConnectionFailedError, match=REACHED):
                connect(url)


@every_client
def test_an_untrusted_ca_is_named_with_the_setting_that_would_trust_it(
    connect: Connect, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(made / "server") as url:
        with pytest.raises(ConnectionFailedError) as caught:
            connect(url)
        assert f"the certificate of {HOST} is not trusted: unable to get local issuer certificate" in str(caught.value)
        assert "It is signed by 'O=tests, CN=test CA', which this machine does not trust" in str(caught.value)
        assert "set MESHGATE_CA to a file with its certificate (or SSL_CERT_FILE," in str(caught.value)
        other = made / "other/ca.crt"
        monkeypatch.setenv(CA, str(other))
        with pytest.raises(ConnectionFailedError, match=f"which neither this machine nor MESHGATE_CA={other} trusts"):
            connect(url)


def test_the_signer_is_left_out_if_it_is_shown_to_clients_with_a_certificate_only(made: Path) -> None:
    strict = {"maximum_version": ssl.TLSVersion.TLSv1_2}  # a later version shows the server's certificate to all
    with (
        serving(made / "server", made / "ca.crt", **strict) as url,
        pytest.raises(ConnectionFailedError, match="It is signed by a CA that this machine does not trust"),
    ):
        by_request(url)


@pytest.mark.parametrize(
    ("certificate", "text"),
    [
        ("misnamed", r"IP address mismatch.*\. Use a name that the certificate has in the URL"),
        ("past", r"certificate has expired\. The ingress needs another certificate"),
    ],
)
def test_another_defect_of_the_ingress_is_named(certificate: str, text: str, made: Path) -> None:
    with serving(made / certificate) as url, pytest.raises(ConnectionFailedError, match=text):
        request_json(UrlDialer(url, "t", ca=made / "ca.crt"), "/v1/status")


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates are verified as in Python 3.13 and later."""
    create = ssl.create_default_context

    def create_strict() -> ssl.SSLContext:
        context = create()
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", create_strict)


@pytest.mark.usefixtures("strict")
def test_a_private_ca_without_key_usage_is_accepted_by_every_python(made: Path) -> None:
    assert Certificates().context().verify_flags & ssl.VERIFY_X509_STRICT
    with serving(made / "server") as url, pytest.raises(ConnectionFailedError, match=REACHED):
        request_json(UrlDialer(url, "t", ca=made / "ca.crt"), "/v1/status")


@every_client
@pytest.mark.usefixtures("strict")
def test_a_private_ca_without_key_usage_in_the_systems_store_is_reported_with_what_relaxes_the_check(
    connect: Connect, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(made / "ca.crt"))
    text = r"is not trusted: .*\. If you trust its CA, set MESHGATE_CA to a file .*, which relaxes this check"
    with serving(made / "server") as url, pytest.raises(ConnectionFailedError, match=text):
        connect(url)


@every_client
def test_a_client_certificate_is_presented(connect: Connect, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CA, str(made / "ca.crt"))
    monkeypatch.setenv(CERT, str(made / "alice.crt"))
    monkeypatch.setenv(KEY, str(made / "alice.key"))
    with serving(made / "server", made / "ca.crt") as url, pytest.raises(ConnectionFailedError, match=REACHED):
        connect(url)


@every_client
def test_without_a_client_certificate_the_error_says_what_to_set(
    connect: Connect, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CA, str(made / "ca.crt"))
    text = r"requires a client certificate \(certificate required\): set MESHGATE_CLIENT_CERT and MESHGATE_CLIENT_KEY"
    with serving(made / "server", made / "ca.crt") as url, pytest.raises(ConnectionFailedError, match=text):
        connect(url)


@every_client
def test_a_refused_client_certificate_is_named_with_its_signer(
    connect: Connect, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert = made / "other/alice.crt"
    monkeypatch.setenv(CA, str(made / "ca.crt"))
    monkeypatch.setenv(CERT, str(cert))
    monkeypatch.setenv(KEY, str(made / "other/alice.key"))
    text = rf"refused the client certificate MESHGATE_CLIENT_CERT={cert} \('CN=alice', signed by 'O=tests, CN=other CA'"
    with serving(made / "server", made / "ca.crt") as url, pytest.raises(ConnectionFailedError, match=text) as caught:
        connect(url)
    assert "unknown ca" in str(caught.value)


def test_an_error_that_is_not_about_certificates_stays_as_it_is(made: Path) -> None:
    old = {"maximum_version": ssl.TLSVersion.TLSv1_2, "minimum_version": ssl.TLSVersion.TLSv1_2}
    modern = Certificates(made / "ca.crt")
    modern.context().minimum_version = ssl.TLSVersion.TLSv1_3
    with serving(made / "server", **old) as url:
        assert modern.explain(url, EOFError(), through_proxy=False) is None
    assert modern.explain(url, ConnectionResetError(), through_proxy=False) is None  # nothing listens any more
    for other in (ConnectionRefusedError(), URLError(TimeoutError())):
        assert modern.explain("wss://gateway.invalid", other, through_proxy=False) is None


def untrusted(url: str) -> ssl.SSLCertVerificationError:
    """The error of a client of this server that does not trust its CA."""
    address = (HOST, int(url.rpartition(":")[2]))
    with socket.create_connection(address) as plain, pytest.raises(ssl.SSLCertVerificationError) as caught:
        ssl.create_default_context().wrap_socket(plain, server_hostname=HOST)
    return caught.value


@pytest.mark.parametrize("proxy", ["HTTPS_PROXY", "WSS_PROXY", None])
def test_an_untrusted_ca_is_explained_without_another_connection_past_a_proxy_or_in_a_session(
    proxy: str | None, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(made / "server") as url:
        error = untrusted(url)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it connects again"))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    if proxy is not None:
        monkeypatch.setenv(proxy, "http://proxy.example:3128")
    for wrapped in (error, URLError(error)):
        why = Certificates().explain(url, wrapped, through_proxy=proxy is not None, resuming=proxy is None)
        assert why is not None
        assert "local issuer certificate. It is signed by a CA that this machine does not trust." in why


def test_a_cut_is_examined_by_another_connection_only_where_that_helps(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def create_connection(address: object, *_: object) -> socket.socket:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", create_connection)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    without, having = Certificates(), Certificates(cert=made / "alice.crt", key=made / "alice.key")
    for certificates in (without, having):
        assert certificates.explain("wss://gateway.example", ConnectionResetError(), through_proxy=True) is None
        assert certificates.explain("wss://gateway.example", OSError("no route"), through_proxy=False) is None
    assert without.explain("wss://g", ConnectionResetError(), through_proxy=False, resuming=True) is None
    assert asked == []
    having.explain("wss://g", ConnectionResetError(), through_proxy=False, resuming=True)
    without.explain("wss://inside.example", ConnectionResetError(), through_proxy=True)
    without.explain("wss://gateway.example:8443", ConnectionResetError(), through_proxy=False)
    assert asked == [("g", 443), ("inside.example", 443), ("gateway.example", 8443)]


def test_a_renewed_file_is_used_for_the_next_connection(made: Path, tmp_path: Path) -> None:
    for name in ("ca.crt", "alice.crt", "alice.key"):
        shutil.copy(made / name, tmp_path)
    dialer = UrlDialer(
        "wss://gateway", "t", ca=tmp_path / "ca.crt", cert=tmp_path / "alice.crt", key=tmp_path / "alice.key"
    )
    first, again = (asyncio.run(dialer.dial()).ssl for _ in range(2))
    assert first is again
    shutil.copy(made / "other/alice.crt", tmp_path)
    with pytest.raises(ConnectionFailedError, match="is not that of the certificate"):  # half of it is renewed
        asyncio.run(dialer.dial())
    shutil.copy(made / "other/alice.key", tmp_path)
    assert asyncio.run(dialer.dial()).ssl is not first


def test_a_certificate_and_its_key_may_be_in_one_file(made: Path, tmp_path: Path) -> None:
    both = tmp_path / "alice.pem"
    both.write_text((made / "alice.key").read_text() + (made / "alice.crt").read_text())
    with serving(made / "server", made / "ca.crt") as url, pytest.raises(ConnectionFailedError, match=REACHED):
        request_json(UrlDialer(url, "t", ca=made / "ca.crt", cert=both), "/v1/status")


def test_arguments_take_precedence_over_variables(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (CA, CERT, KEY):
        monkeypatch.setenv(variable, "/nowhere")
    with pytest.raises(ConnectionFailedError, match="cannot read MESHGATE_CA=/nowhere: No such file"):
        Certificates()
    given = {"ca": made / "ca.crt", "cert": made / "alice.crt"}
    Certificates(**given, key=made / "alice.key")
    with pytest.raises(ConnectionFailedError, match="with the key cert="):  # not that of the variable
        Certificates(**given)


@pytest.mark.parametrize(
    ("ca", "cert", "key", "text"),
    [
        ("alice.key", None, None, "ca=.*alice.key has no certificate in PEM format"),
        (None, "alice.crt", "other/alice.key", "the key key=.*other/alice.key is not that of the certificate cert="),
        (None, "alice.key", "alice.key", "cannot use the client certificate cert=.*both must be in PEM format"),
        (None, "alice.crt", "encrypted.key", "the key key=.*encrypted.key is encrypted"),
        (None, "expired.crt", "expired.key", "expired.crt .'CN=expired', .*, valid until .* has expired: renew it"),
        (None, None, "alice.key", "alice.key has no certificate: set MESHGATE_CLIENT_CERT as well"),
        (None, "gone.crt", "alice.key", "cannot read cert=.*gone.crt: No such file"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    ca: str | None, cert: str | None, key: str | None, text: str, made: Path
) -> None:
    encrypt = ["openssl", "pkey", "-in", "alice.key", "-aes256", "-passout", "pass:secret", "-out", "encrypted.key"]
    subprocess.run(encrypt, cwd=made, check=True)
    files = [None if name is None else made / name for name in (ca, cert, key)]
    with pytest.raises(ConnectionFailedError, match=text):
        UrlDialer("wss://gateway", "t", ca=files[0], cert=files[1], key=files[2])


def test_certificates_of_unencrypted_urls_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CERT, "/nowhere")
    assert UrlDialer("ws://127.0.0.1:1", "t").certificates is None


@contextmanager
def proxying(port: int | None) -> Iterator[tuple[str, list[str]]]:
    """The address of a proxy whose tunnels all lead to this port of this machine, and the heads of its requests. It
    refuses them if there is no port."""
    received: list[str] = []

    class Tunnel(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = ""
            while line := self.rfile.readline().decode().strip():
                head += f"{line}\n"
            received.append(head)
            if port is None:
                self.wfile.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                return
            with socket.create_connection((HOST, port)) as onward:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                back = threading.Thread(target=_copy, args=(onward, self.connection))
                back.start()
                _copy(self.connection, onward)
                back.join()

    with socketserver.ThreadingTCPServer((HOST, 0), Tunnel) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"{HOST}:{server.server_address[1]}", received
        finally:
            server.shutdown()
            thread.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(4096):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@every_client
def test_the_proxy_of_the_environment_is_used(connect: Connect, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CA, str(made / "ca.crt"))
    with serving(made / "misnamed") as url, proxying(port_of(url)) as (proxy, received):
        monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy}")
        with pytest.raises(ConnectionFailedError, match=REACHED):
            connect("wss://gateway.example")
    assert received
    assert all(head.startswith("CONNECT gateway.example:443 ") for head in received)


@every_client
def test_a_gateway_on_this_machine_is_reached_past_the_proxy(
    connect: Connect, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CA, str(made / "ca.crt"))
    with serving(made / "server") as url, proxying(None) as (proxy, received):
        monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy}")
        with pytest.raises(ConnectionFailedError, match=REACHED):
            connect(url)
    assert received == []


@pytest.mark.parametrize(("no_proxy", "tunnels"), [("0.0.0.0", 0), ("gateway.example", 1)])  # the former: this machine
def test_no_proxy_is_honoured(no_proxy: str, tunnels: int, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CA, str(made / "ca.crt"))
    monkeypatch.setenv("NO_PROXY", no_proxy)
    with serving(made / "misnamed") as url, proxying(port_of(url)) as (proxy, received):
        monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy}")
        with pytest.raises(ConnectionFailedError, match=r"the certificate of 0\.0\.0\.0 is not trusted"):
            by_request(f"wss://0.0.0.0:{port_of(url)}")
    assert len(received) == tunnels


def test_a_proxy_that_refuses_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    with proxying(None) as (proxy, received):
        monkeypatch.setenv("HTTPS_PROXY", f"http://alice:s%40cret@{proxy}")
        with pytest.raises(ConnectionFailedError) as refused:
            by_request("wss://gateway.example")
    assert str(refused.value) == (
        f"cannot reach the gateway at wss://gateway.example: the proxy {proxy} does not connect to "
        "gateway.example:443: Tunnel connection failed: 407 Proxy Authentication Required"
    )
    assert f"Proxy-Authorization: Basic {base64.b64encode(b'alice:s@cret').decode()}\n" in received[0]


def test_a_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with closed_port() as port:
        for proxy, why in (
            (f"http://{HOST}:{port}", "does not connect to gateway.example:443"),
            ("socks5://proxy.example:1080", "is not supported: its URL must be of the form http://HOST:PORT"),
            ("proxy.example:3128", "is not supported"),
        ):
            monkeypatch.setenv("HTTPS_PROXY", proxy)
            with pytest.raises(ConnectionFailedError, match=f"the proxy {proxy} {why}"):
                by_request("wss://gateway.example")
