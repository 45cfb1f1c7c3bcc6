"""The changes that the API server streams in response to a watch."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus

import urllib3

from meshgate_kubernetes.api.kinds import Kind
from meshgate_kubernetes.errors import Conflict, KubernetesError
from meshgate_kubernetes.manifests.spec import Object


class Watch(Iterator[tuple[str, Object]]):
    """Changes as ``(ADDED | MODIFIED | DELETED, object)``, until closed here or by the server.

    ``resource_version``: of the last change or bookmark, from which another watch can continue; "" before the first.
    ``close`` may be called from any thread and ends a waiting ``next``.
    """

    def __init__(self, response: urllib3.BaseHTTPResponse, kind: Kind) -> None:
        self._response = response
        self._kind = kind
        self._lines = self._read()
        self._closed = False
        self.resource_version = ""

    def __iter__(self) -> Watch:
        return self

    def __next__(self) -> tuple[str, Object]:
        """Raises StopIteration at the end, Conflict if the resource version is too old (then list again), and
        KubernetesError if the server cannot continue for another reason."""
        for line in self._lines:
            event = json.loads(line)
            if event["type"] == "ERROR":
                self.close()
                status = event["object"]
                error = Conflict if status.get("code") == HTTPStatus.GONE else KubernetesError
                raise error(f"the watch of {self._kind.plural} failed: {status.get('message', 'no reason is given')}")
            self.resource_version = event["object"].get("metadata", {}).get("resourceVersion", self.resource_version)
            if event["type"] != "BOOKMARK":
                head = {"apiVersion": self._kind.api_version, "kind": self._kind.name}
                return event["type"], {**head, **event["object"]}
        raise StopIteration

    def _read(self) -> Iterator[bytes]:
        rest = b""
        # A broken connection, as after close(), ends the watch; the caller lists again and continues.
        with suppress(urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError):
            for data in self._response.stream(65_536, decode_content=True):
                *lines, rest = (rest + data).split(b"\n")
                yield from filter(None, lines)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        connection = getattr(self._response, "connection", None)
        sock = getattr(connection, "sock", None)
        if sock is not None:
            with suppress(OSError):  # already closed by the peer
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
