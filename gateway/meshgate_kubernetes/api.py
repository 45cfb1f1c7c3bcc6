"""The Kubernetes API, and the only module of the distribution that touches it.

Objects go in and come out as JSON, whatever their kind, over one small surface: get, list, create, apply,
delete, watch, log, review, forward. The ``kubernetes`` package is used for what is hard to get right (finding
and refreshing credentials, the connection pool with its TLS); its generated models are not, as they cost a
class for every kind and drop the fields that they do not know.

Everything here blocks and is safe to call from several threads.
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlencode, urlsplit

import kubernetes.client
import kubernetes.config
import urllib3
import yaml

from meshgate_kubernetes.errors import Conflict, Forbidden, KubernetesError, NoCluster, NotFound, Unreachable
from meshgate_kubernetes.kinds import KINDS, Kind
from meshgate_kubernetes.refusals import refusal
from meshgate_kubernetes.spec import Object

__all__ = ["Api", "Tunnel", "Watch"]

FIELD_MANAGER = "meshgate"
_CONNECT_TIMEOUT = 10.0
_READ_TIMEOUT = 60.0
_RECONNECTS = 12
"""Attempts, further and further apart, half a minute in all."""
# Besides its own error the package lets pass whatever a file that is no kubeconfig makes it stumble over.
_STUMBLES = (yaml.YAMLError, OSError, ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True, slots=True)
class Tunnel:
    """What it takes to open a port-forward's websocket: pods/portforward of the API server."""

    url: str
    headers: Mapping[str, str] = field(repr=False)
    ssl: ssl.SSLContext | None
    server_hostname: str | None
    proxy: str | None


class Api:
    """One API server, as one user. ``namespace`` is the default of the kubeconfig's context."""

    def __init__(self, load: Callable[[Any], str], source: str) -> None:
        """``load`` fills in a ``kubernetes.client.Configuration`` and returns the default namespace."""
        self._load = load
        self._lock = threading.Lock()
        self._has_answered = False
        self.source = source
        self._connect()

    def _connect(self) -> None:
        configuration = kubernetes.client.Configuration()
        try:
            self.namespace = self._load(configuration) or "default"
        except (kubernetes.config.ConfigException, *_STUMBLES) as error:
            raise NoCluster(f"{self.source} cannot be used: {error or type(error).__name__}") from error
        self._configuration = configuration
        self._pool: urllib3.PoolManager = kubernetes.client.ApiClient(configuration).rest_client.pool_manager

    @classmethod
    def from_kubeconfig(cls, path: str | Path | None = None, context: str | None = None) -> Api:
        """As ``kubectl`` finds it: ``path``, or ``$KUBECONFIG``, or ``~/.kube/config``. NoCluster if unusable."""
        # The package reads the variable once, when it is imported; a program may set it later.
        chosen = str(path) if path is not None else os.environ.get("KUBECONFIG") or "~/.kube/config"

        def load(configuration: Any) -> str:
            if not any(Path(each).expanduser().exists() for each in filter(None, chosen.split(os.pathsep))):
                raise FileNotFoundError("there is no such file")
            kubernetes.config.load_kube_config(chosen, context, configuration)  # type: ignore[no-untyped-call]
            contexts, active = kubernetes.config.list_kube_config_contexts(chosen)  # type: ignore[no-untyped-call]
            used = next((each for each in contexts if each["name"] == context), active)
            return str(used["context"].get("namespace") or "")

        return cls(load, f"the kubeconfig {chosen}")

    @classmethod
    def in_cluster(cls) -> Api:
        """As the service account of the pod that this process runs in. NoCluster when it runs in none."""

        def load(configuration: Any) -> str:
            kubernetes.config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
            return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text()

        return cls(load, "the pod's service account")

    @property
    def host(self) -> str:
        return str(self._configuration.host)

    def bearer(self) -> str | None:
        """The token this user presents, refreshed, if it is by a token that the API server knows the user."""
        header = self._headers().get("Authorization", "")
        scheme, _, token = header.partition(" ")
        return token.strip() or None if scheme.lower() == "bearer" else None

    # --- objects ------------------------------------------------------------------------------------------

    def get(self, kind: str, name: str, namespace: str) -> Object:
        return self._json("GET", KINDS[kind].path(namespace, name))

    def find(self, kind: str, namespace: str, selector: str = "", fields: str = "") -> tuple[list[Object], str]:
        """The objects, and the resource version to watch from. A namespace of ``""`` lists them everywhere."""
        path = KINDS[kind].path(namespace) if namespace else KINDS[kind].path("_").replace("/namespaces/_", "")
        answer = self._json("GET", path, query=_selectors(selector, fields))
        head = {"apiVersion": KINDS[kind].api_version, "kind": kind}
        return [{**head, **item} for item in answer.get("items") or []], answer["metadata"]["resourceVersion"]

    def create(self, obj: Object) -> Object:
        """Conflict when it exists."""
        return self._json("POST", _kind_of(obj).path(_namespace_of(obj)), obj, query={"fieldManager": FIELD_MANAGER})

    def apply(self, obj: Object) -> Object:
        """Makes the existing object agree with ``obj`` (server-side apply, ours by force), or creates it."""
        path = _kind_of(obj).path(_namespace_of(obj), obj["metadata"]["name"])
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return self._json("PATCH", path, obj, query=query, content_type="application/apply-patch+yaml")

    def merge(self, kind: str, name: str, namespace: str, patch: Object) -> Object:
        path = KINDS[kind].path(namespace, name)
        return self._json("PATCH", path, patch, content_type="application/merge-patch+json")

    def delete(
        self,
        kind: str,
        name: str,
        namespace: str,
        *,
        propagation: Literal["Foreground", "Background", "Orphan"] = "Background",
        uid: str | None = None,
        grace: int | None = None,
    ) -> None:
        """Asks for the object's deletion. NotFound when it is not there, or is another than ``uid``."""
        body: Object = {"propagationPolicy": propagation}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            self._json("DELETE", KINDS[kind].path(namespace, name), body)
        except Conflict as error:
            raise NotFound(str(error)) from error

    def serves(self, kind: str) -> bool:
        """Whether the API server knows ``kind`` (a custom one may not be installed)."""
        known = KINDS[kind]
        try:
            answer = self._json("GET", f"/apis/{known.api_version}" if known.group else f"/api/{known.api_version}")
        except (NotFound, Forbidden):
            return False
        return any(resource["kind"] == kind for resource in answer.get("resources", []))

    def watch(self, kind: str, namespace: str, selector: str, resource_version: str) -> Watch:
        """Changes after ``resource_version``, until closed or the server has had enough."""
        query = {
            **_selectors(selector),
            "watch": "true",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
        }
        path = f"{KINDS[kind].path(namespace)}?{urlencode(query)}"
        return Watch(self._request("GET", path, stream=True), KINDS[kind])

    def log(self, pod: str, namespace: str, container: str, *, lines: int, previous: bool = False) -> str:
        """The last ``lines`` of a container's output, of its previous run if asked for."""
        query = {"container": container, "tailLines": str(lines), "previous": str(previous).lower()}
        path = f"{KINDS['Pod'].path(namespace, pod)}/log?{urlencode(query)}"
        data: bytes = self._request("GET", path).data
        return data.decode(errors="replace")

    # --- who may ------------------------------------------------------------------------------------------

    def may(self, deed: Mapping[str, str]) -> bool:
        """Whether this user may do ``deed`` (resourceAttributes)."""
        return self._review("SelfSubjectAccessReview", {"resourceAttributes": dict(deed)})

    def rules(self, namespace: str) -> list[Object]:
        """What this user may do in ``namespace``, as rules of RBAC; there may be more that the server cannot list."""
        version = "authorization.k8s.io/v1"
        body = {"apiVersion": version, "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}}
        status = self._json("POST", f"/apis/{version}/selfsubjectrulesreviews", body)["status"]
        return list(status.get("resourceRules") or [])

    def user_who_may_not(self, verb: str, kind: str, namespace: str) -> str:
        """The name of this user, as the API server says it when it refuses a deed; "" where it does not. Nothing
        is changed: the deed is only tried."""
        method = {"create": "POST", "patch": "PATCH", "delete": "DELETE"}.get(verb, "GET")
        path = KINDS[kind].path(namespace, "" if verb in ("create", "list", "watch") else "any")
        try:
            self._json(method, path, {}, query={"dryRun": "All"} if method != "GET" else None)
        except Forbidden as error:
            return error.user
        except KubernetesError:
            return ""
        return ""

    def user_may(self, user: Mapping[str, Any], attributes: Mapping[str, str]) -> bool:
        """Whether the user of a token review may do what ``attributes`` (resourceAttributes) say."""
        spec = {
            "user": user.get("username", ""),
            "uid": user.get("uid", ""),
            "groups": list(user.get("groups") or []),
            "extra": dict(user.get("extra") or {}),
            "resourceAttributes": dict(attributes),
        }
        return self._review("SubjectAccessReview", spec)

    def _review(self, kind: str, spec: Object) -> bool:
        version = "authorization.k8s.io/v1"
        body = {"apiVersion": version, "kind": kind, "spec": spec}
        answer = self._json("POST", f"/apis/{version}/{kind.lower()}s", body)
        return bool(answer["status"].get("allowed"))

    def user_of_token(self, token: str) -> Object | None:
        """Who ``token`` belongs to (``username``, ``groups``, …), or None when nobody has it."""
        version = "authentication.k8s.io/v1"
        body = {"apiVersion": version, "kind": "TokenReview", "spec": {"token": token}}
        status = self._json("POST", f"/apis/{version}/tokenreviews", body)["status"]
        return cast("Object", status["user"]) if status.get("authenticated") else None

    # --- a way into a pod ---------------------------------------------------------------------------------

    def tunnel(self, pod: str, namespace: str, port: int) -> Tunnel:
        """How to open a port-forward to ``port`` of ``pod``, with credentials that are fresh now."""
        path = f"{KINDS['Pod'].path(namespace, pod)}/portforward?ports={port}"
        configuration = self._configuration
        return Tunnel(
            url=re.sub("^http", "ws", self.host) + path,
            headers=self._headers(),
            ssl=self._ssl_context() if urlsplit(self.host).scheme == "https" else None,
            server_hostname=getattr(configuration, "tls_server_name", None) or None,
            proxy=getattr(configuration, "proxy", None) or None,
        )

    def _ssl_context(self) -> ssl.SSLContext:
        configuration = self._configuration
        context = ssl.create_default_context(
            cafile=configuration.ssl_ca_cert, cadata=getattr(configuration, "ca_cert_data", None)
        )
        if not configuration.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        elif configuration.assert_hostname is False:
            context.check_hostname = False
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, configuration.key_file)
        return context

    # --- the request itself -------------------------------------------------------------------------------

    def _headers(self) -> dict[str, str]:
        with self._lock:  # the hook that refreshes an expired token is not made for threads
            value = self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        return {"Authorization": value} if value else {}

    def _json(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        if query:
            path = f"{path}?{urlencode(query)}"
        return cast("Object", json.loads(self._request(method, path, body, content_type=content_type).data))

    def _request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = "application/json",
        stream: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        response = self._send(method, path, body, content_type, stream)
        if response.status == 401:  # the file may hold newer credentials by now
            response.release_conn()
            self._connect()
            response = self._send(method, path, body, content_type, stream)
        if response.status >= 400:
            request = f"{method} {path.partition('?')[0]}"
            raise refusal(response.status, response.data, host=self.host, source=self.source, request=request)
        return response

    def _send(
        self, method: str, path: str, body: Object | None, content_type: str, stream: bool
    ) -> urllib3.BaseHTTPResponse:
        # An API server that has answered before is only being restarted: nothing was sent, so try again.
        connects = _RECONNECTS if self._has_answered else 1
        try:
            response = self._pool.request(
                method,
                self.host + path,
                body=None if body is None else json.dumps(body).encode(),
                headers={"Content-Type": content_type, "Accept": "application/json", **self._headers()},
                # A watch is silent for as long as nothing happens; the server's bookmarks end that each minute.
                timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT, read=3 * _READ_TIMEOUT if stream else _READ_TIMEOUT),
                retries=urllib3.Retry(
                    connect=connects, read=0, redirect=0, status=0, other=0, backoff_factor=0.1, backoff_max=3.0
                ),
                preload_content=not stream,
            )
        except urllib3.exceptions.HTTPError as error:
            reason = getattr(error, "reason", None) or error
            raise Unreachable(
                f"the API server at {self.host} ({self.source}) does not answer: {reason}. "
                "Is the cluster up, and reachable from here (a VPN, a proxy)?"
            ) from error
        self._has_answered = True
        return response


class Watch(Iterator[tuple[str, Object]]):
    """Changes as ``(ADDED | MODIFIED | DELETED, object)``. Ends when closed, and when the server ends it.

    ``close`` may be called from any thread, and wakes the one that waits in ``next``.
    """

    def __init__(self, response: urllib3.BaseHTTPResponse, kind: Kind) -> None:
        self._response = response
        self._kind = kind
        self._lines = self._read()
        self._closed = False

    def __iter__(self) -> Watch:
        return self

    def __next__(self) -> tuple[str, Object]:
        """StopIteration at the end; Conflict when the resource version is too old: list again."""
        for line in self._lines:
            event = json.loads(line)
            if event["type"] == "ERROR":
                self.close()
                raise Conflict(event["object"].get("message", "the watch failed"))
            if event["type"] != "BOOKMARK":
                head = {"apiVersion": self._kind.api_version, "kind": self._kind.name}
                return event["type"], {**head, **event["object"]}
        raise StopIteration

    def _read(self) -> Iterator[bytes]:
        rest = b""
        # A connection that breaks, also by close(), ends the watch; whoever watches lists again and goes on.
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
            with suppress(OSError):  # the peer was first
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _kind_of(obj: Object) -> Kind:
    return KINDS[obj["kind"]]


def _namespace_of(obj: Object) -> str:
    return str(obj["metadata"]["namespace"])


def _selectors(selector: str = "", fields: str = "") -> dict[str, str]:
    return {**({"labelSelector": selector} if selector else {}), **({"fieldSelector": fields} if fields else {})}
