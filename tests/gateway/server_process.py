"""A real gateway process for tests, with plain sockets as its clients, and its log."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from meshgate_wire import PROTOCOL_VERSION

TOKEN = "correct-horse-battery-staple"
DEADLINE = 60.0
STUBS = Path(__file__).parent / "run_gateway.py"


@dataclass(frozen=True)
class HttpResponse:
    status: int
    headers: Mapping[str, str]
    body: Any

    @property
    def error(self) -> str:
        return str(self.body["error"])


class Socket:
    """A connection with a timeout on every operation."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)
        self._received = b""

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def command(self, line: str) -> Any:
        """Sends a line to a stub engine and returns its answer."""
        self.send(line.encode() + b"\n")
        return self.answer()

    def answer(self) -> Any:
        return json.loads(self._until(b"\n"))

    def head(self) -> tuple[int, dict[str, str]]:
        lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), headers

    def http(self) -> HttpResponse:
        """A complete response, up to the end of the connection."""
        status, headers = self.head()
        body = self.rest()
        assert len(body) == int(headers["Content-Length"])
        return HttpResponse(status, headers, json.loads(body))

    def rest(self) -> bytes:
        """The remaining data until the peer closes."""
        while more := self._socket.recv(65536):
            self._received += more
        data, self._received = self._received, b""
        return data

    def closed_by_peer(self) -> bool:
        try:
            return self.rest() == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _until(self, end: bytes) -> bytes:
        while end not in self._received:
            more = self._socket.recv(65536)
            if not more:
                raise EOFError(f"closed after {self._received!r}")
            self._received += more
        data, _, self._received = self._received.partition(end)
        return data


class ServerProcess:
    """A gateway process; a context manager that stops it."""

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = (str(STUBS),),
    ) -> None:
        announce, announce_write = os.pipe()
        lifetime_read, self.lifetime = os.pipe()
        fixed = ["--log-format", "json", "--announce-fd", str(announce_write), "--lifetime-fd", str(lifetime_read)]
        self.process = subprocess.Popen(
            [sys.executable, *program, *fixed, *arguments],
            env={**os.environ, "MESHGATE_TOKEN": TOKEN, **(environment or {})},
            pass_fds=(announce_write, lifetime_read),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        os.close(announce_write)
        os.close(lifetime_read)
        self._lines: list[str] = []
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        with os.fdopen(announce) as announced:
            line = announced.readline()
        if not line:
            self.close()
            raise RuntimeError(f"the gateway did not announce itself:\n{self.log}")
        self.announcement: dict[str, Any] = json.loads(line)
        self.url = str(self.announcement["url"])
        self.port = int(urlsplit(self.url).port or 0)

    # --- requests ---------------------------------------------------------------------------------------

    def connect(self) -> Socket:
        return Socket(self.port)

    def ask(self, path: str, *, method: str = "GET", token: str | None = None, **headers: str) -> HttpResponse:
        with self.connect() as connection:
            connection.send(request(path, method=method, token=token, **headers))
            return connection.http()

    def dial(self, session: str | None = None, *, resume: bool = False, **headers: str) -> Socket:
        """Sends the handshake of a session without reading the response."""
        connection = self.connect()
        connection.send(handshake(session or uuid.uuid4().hex, resume=resume, **headers))
        return connection

    def join(self, session: str | None = None, *, resume: bool = False) -> Socket:
        """Connects to a session, up to the engine's 101 response."""
        connection = self.dial(session, resume=resume)
        status, _ = connection.head()
        assert status == 101
        return connection

    def failed(self, session: str | None = None, *, resume: bool = False, **headers: str) -> HttpResponse:
        with self.dial(session, resume=resume, **headers) as connection:
            return connection.http()

    # --- log --------------------------------------------------------------------------------------------

    @property
    def log(self) -> str:
        with self._more:
            return "\n".join(self._lines)

    def wait_logged(self, event: str, **facts: Any) -> dict[str, Any]:
        """Waits for a log event with these facts, and returns it."""
        return self.wait_logged_times(event, 1, **facts)[0]

    def wait_logged_times(self, event: str, times: int, **facts: Any) -> list[dict[str, Any]]:
        """Waits until an event with these facts has been logged so often, and returns all of them."""
        deadline = time.monotonic() + DEADLINE
        with self._more:
            found: list[dict[str, Any]] = []
            seen = 0
            while True:
                events = map(json.loads, self._lines[seen:])
                found += [each for each in events if each["event"] == event and facts.items() <= each.items()]
                if len(found) >= times:
                    return found
                seen = len(self._lines)
                if not self._more.wait(max(0, deadline - time.monotonic())):
                    raise AssertionError(f"no {event!r} with {facts} in\n" + "\n".join(self._lines))

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(DEADLINE)

    # --- closing ----------------------------------------------------------------------------------------

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        assert self.process.stderr is not None
        self.process.stderr.close()
        if self.lifetime >= 0:
            os.close(self.lifetime)
            self.lifetime = -1

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._more:
                self._lines.append(line.decode().rstrip("\n"))
                self._more.notify_all()


def request(path: str, *, method: str = "GET", token: str | None = None, **headers: str) -> bytes:
    fields = {"Host": "gateway", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if token is not None:
        fields["Authorization"] = f"Bearer {token}"
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


def handshake(session: str, *, resume: bool = False, token: str | None = TOKEN, **headers: str) -> bytes:
    fields = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Meshgate-Protocol": str(PROTOCOL_VERSION),
        "Meshgate-Version": "0.1.0",
        **({"Meshgate-Resume": "1"} if resume else {}),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return request(f"/v1/sessions/{session}", token=token, **fields)


def wait_gone(*pids: int) -> None:
    """Waits until all these processes have exited."""
    deadline = time.monotonic() + DEADLINE
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            gone, _, _ = select.select([descriptor], [], [], max(0, deadline - time.monotonic()))
            assert gone, f"process {pid} is still running"
        finally:
            os.close(descriptor)
