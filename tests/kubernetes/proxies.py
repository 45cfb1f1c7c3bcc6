"""The proxies of docs/ingress.md, each with the configuration that the page has for it."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.certificates import create_certificates, sign
from tests.programs import ROOT
from tests.waiting import wait_for

INSTALLED = ROOT / "build" / "proxies" / "bin"  # by tests/kubernetes/images


@dataclass(frozen=True)
class Program:
    """How a proxy runs in the directory of its configuration."""

    arguments: tuple[str, ...]
    files: tuple[str, ...]
    """Those that the page shows."""
    cut: signal.Signals | None = None
    """Closes all connections; without one, a restart does."""
    stop: signal.Signals = signal.SIGTERM


PROXIES = {
    "nginx": Program(("-p", ".", "-c", "test.conf"), ("nginx.conf",), cut=signal.SIGHUP),
    "haproxy": Program(("-db", "-f", "haproxy.cfg"), ("haproxy.cfg",)),
    "envoy": Program(("-c", "envoy.yaml", "--disable-hot-restart", "--concurrency", "1"), ("envoy.yaml",)),
    # it waits up to ten seconds for connections
    "traefik": Program(("--configFile=traefik.yaml",), ("traefik.yaml", "routes.yaml"), stop=signal.SIGKILL),
}
EVERYTHING_ELSE_OF_NGINX = """
daemon off;
pid nginx.pid;
error_log error.log;
worker_shutdown_timeout 200ms;
events { worker_connections 64; }
http {
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
    include nginx.conf;
    include clients*.conf;
}
"""


class Proxy:
    """A proxy in front of one gateway. A driver needs ``url`` and ``ca``, and a client certificate if it asks for one:
    then this process presents ``first.crt``."""

    def __init__(self, name: str, directory: Path, address: str, port: int) -> None:
        self.url, self.ca = f"wss://{address}:{port}", directory / "ca.crt"
        self._program, self._directory, self._address, self._port = PROXIES[name], directory, address, port
        self._command = [_find(name), *self._program.arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when the gateway answers through it: it may accept connections before it has read its routes."""
        with (self._directory / "output").open("ab") as output:
            process = subprocess.Popen(self._command, cwd=self._directory, stdout=output, stderr=output)
        self._process = process
        wait_for(lambda: process.poll() is not None or self._answers(), self._command[0])
        assert process.poll() is None, (self._directory / "output").read_text()

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(self._program.stop)
            self._process.wait(30)

    def accept_clients_of(self, other: Path) -> None:
        """Of the CA in this directory, and of no other from now on. Its ``first.crt`` replaces that of this process."""
        for source in (other / "ca.crt", other / "first.crt", other / "first.key"):
            shutil.copy(source, self._directory / source.name.replace("ca.crt", "clients.crt"))
        self.cut()

    def cut(self) -> None:
        """Closes all connections, as when its configuration changes."""
        if self._program.cut is None:
            self.stop()
            self.start()
        elif self._process is not None:
            self._process.send_signal(self._program.cut)

    @contextmanager
    def cutting_every(self, seconds: float) -> Iterator[None]:
        """Closes all connections every ``seconds``."""
        stop = threading.Event()

        def cut() -> None:
            while not stop.wait(seconds):
                self.cut()

        thread = threading.Thread(target=cut)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _answers(self) -> bool:
        trusted = ssl.create_default_context(cafile=str(self.ca))
        if (certificate := self._directory / "first.crt").exists():
            trusted.load_cert_chain(certificate, self._directory / "first.key")
        connection = http.client.HTTPSConnection(self._address, self._port, timeout=5, context=trusted)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


@contextmanager
def proxy(
    name: str, directory: Path, address: str, upstream: int, *, verifies_clients: bool = False
) -> Iterator[Proxy]:
    """Terminates TLS at ``address`` and proxies to the local port ``upstream``. If it verifies clients, it accepts
    certificates of the CA in ``clients.crt``, among them ``first.crt``."""
    create_certificates(directory, address)
    certificate, key = ((directory / f"server.{end}").read_text() for end in ("crt", "key"))
    (directory / "server.pem").write_text(certificate + key)
    port = _free_port(address)
    _write_configuration(PROXIES[name], directory, (address, port), upstream)
    if verifies_clients:
        sign(directory, "first")
        shutil.copy(directory / "ca.crt", directory / "clients.crt")
        CLIENTS[name](directory)
    running = Proxy(name, directory, address, port)
    try:
        running.start()
        yield running
    finally:
        running.stop()


def _write_configuration(program: Program, directory: Path, listen: tuple[str, int], upstream: int) -> None:
    """The files of the page, with other addresses."""
    address, port = listen
    changes = {
        "NAME-gateway.NAMESPACE:8650": f"127.0.0.1:{upstream}",
        "address: NAME-gateway.NAMESPACE, port_value: 8650": f"address: 127.0.0.1, port_value: {upstream}",
        "listen 443": f"listen {address}:{port}",
        "bind :443": f"bind {address}:{port}",
        "address: 0.0.0.0, port_value: 443": f"address: {address}, port_value: {port}",
        'address: ":443"': f'address: "{address}:{port}"',
    }
    changed = 0
    for name in program.files:
        text = block("ingress.md", name)
        for old, new in changes.items():
            changed += text.count(old)
            text = text.replace(old, new)
        (directory / name).write_text(text)
    assert changed == 2, f"docs/ingress.md: the addresses of {', '.join(program.files)} are not the expected ones"
    if "nginx.conf" in program.files:
        (directory / "test.conf").write_text(EVERYTHING_ELSE_OF_NGINX)


def _nginx_verifies_clients(directory: Path) -> None:
    (directory / "clients.conf").write_text(block("ingress.md", "clients.conf"))


def _haproxy_verifies_clients(directory: Path) -> None:
    found = re.search(r"`bind :443 (ssl [^`]*)`", (ROOT / "docs/ingress.md").read_text())
    assert found is not None, "docs/ingress.md does not say how HAProxy verifies clients"
    configuration = directory / "haproxy.cfg"
    text = configuration.read_text()
    assert text.count("ssl crt server.pem") == 1
    configuration.write_text(text.replace("ssl crt server.pem", " ".join(found[1].split())))


CLIENTS = {"nginx": _nginx_verifies_clients, "haproxy": _haproxy_verifies_clients}


def block(page: str, name: str) -> str:
    """The code block of a page of docs/ that begins with the comment ``name``."""
    text = (ROOT / "docs" / page).read_text()
    found = re.findall(rf"^```\w+\n# {re.escape(name)}\b[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(found) == 1, f"docs/{page}: not exactly one block begins with the comment {name}"
    return str(found[0])


def _find(name: str) -> str:
    """The path of the program."""
    found = shutil.which(name, path=os.pathsep.join([str(INSTALLED), os.environ.get("PATH", ""), "/usr/sbin"]))
    assert found is not None, f"{name} is not installed: run tests/kubernetes/images as root"
    return found


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as free:
        return int(free.getsockname()[1])
