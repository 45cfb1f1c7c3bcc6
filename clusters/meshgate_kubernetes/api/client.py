"""The client of the Kubernetes API.

Objects of every kind are JSON. Of the ``kubernetes`` package it uses what is hard to get right: finding and refreshing
credentials, and the connection pool with TLS. It does not use the generated models, which need a class per kind and
drop unknown fields.

All methods block and are thread-safe.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast
from urllib.parse import quote, urlencode, urlsplit

import urllib3

from meshgate_kubernetes.errors import (
    BUSY,
    Conflict,
    Forbidden,
    KubernetesError,
    NoCluster,
    NotFound,
    NotKubernetes,
    Unreachable,
    UntrustedCertificate,
    is_status,
    rejection_error,
)
from meshgate_kubernetes.manifests.spec import Object

log = logging.getLogger("meshgate.jobs.kubernetes")
_P = ParamSpec("_P")
_R = TypeVar("_R")
FIELD_MANAGER = "meshgate"
_PAGE = 500
"""Objects that one response lists; an API server would otherwise build thousands in its memory at once."""
_CONNECT_TIMEOUT = 10.0
_READ_TIMEOUT = 60.0
_RECONNECTS = 12
"""Attempts with increasing delays, half a minute in total."""
PATIENCE = 180.0
"""Seconds for which ``Api.patiently`` repeats a request: longer than an API server restarts."""
_FIRST_PAUSE, _LONGEST_PAUSE, _WARN_AFTER = 0.2, 5.0, 5.0


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
                self._lines.close()  # at once, and not when the error, which refers to this watch, is collected
                status = event["object"]
                error = Conflict if status.get("code") == HTTPStatus.GONE else KubernetesError
                raise error(f"the watch of {self._kind.plural} failed: {status.get('message', 'no reason is given')}")
            self.resource_version = event["object"].get("metadata", {}).get("resourceVersion", self.resource_version)
            if event["type"] != "BOOKMARK":
                head = {"apiVersion": self._kind.api_version, "kind": self._kind.name}
                return event["type"], {**head, **event["object"]}
        raise StopIteration

    def _read(self) -> Generator[bytes, None, None]:
        rest = b""
        # A broken connection, as after close(), ends the watch; the caller lists again and continues.
        with suppress(urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError), closing(self._response):
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


def ssl_context(configuration: Any) -> ssl.SSLContext:
    """The context of a ``kubernetes.client.Configuration``.

    Python 3.13 and later reject CAs without a key usage extension (``VERIFY_X509_STRICT``), among them those of many
    clusters. That check is cleared for a CA that the configuration names, because the user has chosen that very CA; it
    stays for the CAs of the system.
    """
    ca_data = getattr(configuration, "ca_cert_data", None)
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=ca_data)
    if configuration.ssl_ca_cert or ca_data:
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif configuration.assert_hostname is False:
        context.check_hostname = False
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


def certificate_problem(error: BaseException | None) -> str | None:
    """Why the server's certificate was rejected, if that is what caused ``error``; otherwise None."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message or str(error)
        error = error.__cause__ or error.__context__
    return None


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind with its ``apiVersion`` and its plural name in API paths."""

    name: str
    api_version: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def resource(self) -> str:
        """The name that kubectl prints: ``statefulsets.apps``."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, name: str = "") -> str:
        """Of the objects, or of one of them. Namespace ``""`` stands for all namespaces."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        scope = f"/namespaces/{quote(namespace, safe='')}" if self.namespaced and namespace else ""
        return f"{root}{scope}/{self.plural}" + (f"/{quote(name, safe='')}" if name else "")


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("ConfigMap", "v1", "configmaps"),
        Kind("Event", "v1", "events"),
        Kind("LimitRange", "v1", "limitranges"),
        Kind("Node", "v1", "nodes", namespaced=False),
        Kind("Pod", "v1", "pods"),
        Kind("ResourceQuota", "v1", "resourcequotas"),
        Kind("Secret", "v1", "secrets"),
        Kind("Service", "v1", "services"),
        Kind("ServiceAccount", "v1", "serviceaccounts"),
        Kind("Deployment", "apps/v1", "deployments"),
        Kind("ReplicaSet", "apps/v1", "replicasets"),
        Kind("StatefulSet", "apps/v1", "statefulsets"),
        Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies"),
        Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets"),
        Kind("Role", "rbac.authorization.k8s.io/v1", "roles"),
        Kind("RoleBinding", "rbac.authorization.k8s.io/v1", "rolebindings"),
        Kind("MonarchMesh", "monarch.pytorch.org/v1alpha1", "monarchmeshes"),
    )
}


@dataclass(frozen=True, slots=True)
class PortForwardRequest:
    """The parameters of a port-forward (pods/portforward)."""

    url: str
    port: int
    headers: Mapping[str, str] = field(repr=False)
    ssl: ssl.SSLContext | None
    server_hostname: str | None
    proxy: str | None


class Api:
    """One API server, used with one user's credentials. ``namespace`` is the default namespace of the ``context``,
    which is empty inside a cluster."""

    def __init__(self, load: Callable[[Any], tuple[str, str]], source: str) -> None:
        """``load`` completes a ``kubernetes.client.Configuration`` and returns the context and its default
        namespace."""
        self._load = load
        self._lock = threading.Lock()
        self._patience = threading.local()
        self._has_responded = False
        self.source = source
        self._connect()

    def _connect(self) -> None:
        self._pool: urllib3.PoolManager
        self.context: str
        self.namespace: str
        connected = _credentials().connect(self._load, self.source)
        self._configuration, self._pool, self.context, self.namespace = connected
        self._ssl = self._ssl_context() if urlsplit(self.host).scheme == "https" else None
        if self._ssl is not None:
            # urllib3 would load these into the context for each new connection, while other threads use it: a crash.
            for name in ("ca_certs", "cert_file", "key_file"):
                self._pool.connection_pool_kw.pop(name, None)
            self._pool.connection_pool_kw["ssl_context"] = self._ssl

    def _ssl_context(self) -> ssl.SSLContext:
        try:
            return ssl_context(self._configuration)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise NoCluster(f"cannot use the certificates of {self.source}: {error}") from error

    @classmethod
    def from_kubeconfig(cls, path: str | Path | None = None, context: str = "", server: str = "") -> Api:
        """Uses ``path``, ``$KUBECONFIG`` or ``~/.kube/config``, as kubectl does, and ``context`` instead of the current
        one. Raises NoCluster, and OtherCluster if neither it nor the current one has the address ``server``."""
        return cls(*_credentials().from_kubeconfig(path, context, server))

    @classmethod
    def in_cluster(cls) -> Api:
        """Uses the service account of the pod that this process runs in. Raises NoCluster outside a pod."""
        return cls(*_credentials().from_service_account())

    @property
    def host(self) -> str:
        return str(self._configuration.host)

    def patiently(self) -> AbstractContextManager[None]:
        """Meanwhile, each request of this thread that the API server does not answer, or rejects because it is too busy
        or restarts, is repeated for up to ``PATIENCE`` seconds, unless it has never answered."""
        return self._patience_of(PATIENCE)

    def impatiently(self) -> AbstractContextManager[None]:
        """Meanwhile, no request of this thread is repeated, although the caller is patient."""
        return self._patience_of(0.0)

    @contextmanager
    def _patience_of(self, seconds: float) -> Iterator[None]:
        before, self._patience.seconds = getattr(self._patience, "seconds", 0.0), seconds
        try:
            yield
        finally:
            self._patience.seconds = before

    # --- objects ------------------------------------------------------------------------------------------

    def get(self, kind: str, name: str, namespace: str) -> Object:
        return self._json("GET", KINDS[kind].path(namespace, name))

    def list_objects(self, kind: str, namespace: str, selector: str = "", fields: str = "") -> tuple[list[Object], str]:
        """The objects, and the resource version to watch from. Namespace ``""`` lists all namespaces."""
        path = KINDS[kind].path(namespace)
        head = {"apiVersion": KINDS[kind].api_version, "kind": kind}
        query = {**_selectors(selector, fields), "limit": str(_PAGE)}
        found: list[Object] = []
        while True:
            page = self._json("GET", path, query=query)
            found += [{**head, **item} for item in page.get("items") or []]
            if not (token := page["metadata"].get("continue")):
                return found, page["metadata"]["resourceVersion"]
            query = {**query, "continue": token}

    def create(self, obj: Object, *, dry_run: bool = False) -> Object:
        """Raises Conflict if the object exists. ``dry_run``: asks everything that admits objects, and creates none."""
        query = {"fieldManager": FIELD_MANAGER, **({"dryRun": "All"} if dry_run else {})}
        return self._json("POST", _kind_of(obj).path(_namespace_of(obj)), obj, query=query)

    def merge_patch(self, kind: str, name: str, namespace: str, patch: Object) -> Object:
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
        """Requests the deletion. Raises NotFound if the object does not exist or has another uid."""
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
        """Whether the API server serves ``kind``; false for a custom resource that is not installed."""
        known = KINDS[kind]
        try:
            response = self._json("GET", f"/apis/{known.api_version}" if known.group else f"/api/{known.api_version}")
        except (NotFound, Forbidden):
            return False
        return any(resource["kind"] == kind for resource in response.get("resources", []))

    def watch(self, kind: str, namespace: str, selector: str, resource_version: str, fields: str = "") -> Watch:
        """Changes after ``resource_version``, until closed here or by the server."""
        query = {
            **_selectors(selector, fields),
            "watch": "true",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
        }
        path = f"{KINDS[kind].path(namespace)}?{urlencode(query)}"
        return Watch(self._request("GET", path, stream=True), KINDS[kind])

    def read_log(self, pod: str, namespace: str, container: str, *, lines: int, previous: bool = False) -> str:
        """The last ``lines`` of a container's output; with ``previous``, of its previous run."""
        query = {"container": container, "tailLines": str(lines), "previous": str(previous).lower()}
        path = f"{KINDS['Pod'].path(namespace, pod)}/log?{urlencode(query)}"
        data: bytes = self._request("GET", path).data
        return data.decode(errors="replace")

    # --- authentication and authorization -----------------------------------------------------------------

    def is_allowed(self, attributes: Mapping[str, str]) -> bool:
        """Whether this user has the permission of these resourceAttributes."""
        return self._review("SelfSubjectAccessReview", {"resourceAttributes": dict(attributes)})

    def list_rules(self, namespace: str) -> list[Object]:
        """This user's permissions in ``namespace``, as RBAC rules. The list may be incomplete."""
        version = "authorization.k8s.io/v1"
        body = {"apiVersion": version, "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}}
        status = self._json("POST", f"/apis/{version}/selfsubjectrulesreviews", body)["status"]
        return list(status.get("resourceRules") or [])

    def denied_user(self, verb: str, kind: str, namespace: str) -> str:
        """The name of this user, from the API server's error for a forbidden request; "" if unknown.

        The request is a dry run.
        """
        method = {"create": "POST", "patch": "PATCH", "delete": "DELETE"}.get(verb, "GET")
        path = KINDS[kind].path(namespace, "" if verb in ("create", "list", "watch") else "any")
        try:
            self._json(method, path, {}, query={"dryRun": "All"} if method != "GET" else None)
        except Forbidden as error:
            return error.user
        except KubernetesError:
            return ""
        return ""

    def is_user_allowed(self, user: Mapping[str, Any], attributes: Mapping[str, str]) -> bool:
        """Whether the user of a token review has the permission of these resourceAttributes."""
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
        response = self._json("POST", f"/apis/{version}/{kind.lower()}s", body)
        return bool(response["status"].get("allowed"))

    def review_token(self, token: str) -> Object | None:
        """The user of ``token`` (``username``, ``groups``, …); None if the token is not valid."""
        version = "authentication.k8s.io/v1"
        body = {"apiVersion": version, "kind": "TokenReview", "spec": {"token": token}}
        status = self._json("POST", f"/apis/{version}/tokenreviews", body)["status"]
        return cast("Object", status["user"]) if status.get("authenticated") else None

    # --- port-forward -------------------------------------------------------------------------------------

    def port_forward(self, pod: str, namespace: str, port: int) -> PortForwardRequest:
        """The parameters of a port-forward to ``port`` of ``pod``, with current credentials."""
        path = f"{KINDS['Pod'].path(namespace, pod)}/portforward?ports={port}"
        configuration = self._configuration
        return PortForwardRequest(
            url=re.sub("^http", "ws", self.host) + path,
            port=port,
            headers=self._headers(),
            ssl=self._ssl,
            server_hostname=getattr(configuration, "tls_server_name", None) or None,
            proxy=getattr(configuration, "proxy", None) or None,
        )

    # --- requests -----------------------------------------------------------------------------------------

    def _headers(self) -> dict[str, str]:
        with self._lock:  # the hook that refreshes an expired token is not thread-safe
            value = _credentials().bearer(self._configuration)
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
        data = self._request(method, path, body, content_type=content_type).data
        try:
            return cast("Object", json.loads(data))
        except ValueError as error:
            raise NotKubernetes(
                f"the server at {self.host} ({self.source}) is not a Kubernetes API server: its answer to "
                f"{method} {path.partition('?')[0]} is no JSON. Check clusters[].cluster.server"
            ) from error

    def _request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = "application/json",
        stream: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        response = self._send_until_accepted(method, path, body, content_type, stream)
        if response.status == 401:  # the kubeconfig may contain newer credentials by now
            response.release_conn()
            self._connect()
            response = self._send_until_accepted(method, path, body, content_type, stream)
        if response.status >= 400:
            request = f"{method} {path.partition('?')[0]}"
            # For an API group that is not installed, an API server responds with plain text as well.
            if response.status == 404 and path.startswith("/api/v1/") and not is_status(response.data):
                raise NotKubernetes(
                    f"the server at {self.host} ({self.source}) is not a Kubernetes API server: it responds to "
                    f"{request} with 404. Check clusters[].cluster.server"
                )
            raise rejection_error(response.status, response.data, host=self.host, source=self.source, request=request)
        return response

    def _send_until_accepted(
        self, method: str, path: str, body: Object | None, content_type: str, stream: bool
    ) -> urllib3.BaseHTTPResponse:
        """The first response that does not reject the request as one too many, or the last within the patience.

        A request whose connection breaks is repeated as well, although the server may have executed it: callers that
        are patient expect the Conflict that follows.
        """
        started, pause, warned = time.monotonic(), _FIRST_PAUSE, False
        deadline = started + getattr(self._patience, "seconds", 0.0)
        while True:
            asked = 0.0
            try:
                response = self._send(method, path, body, content_type, stream)
                left = deadline - time.monotonic()
                if response.status not in BUSY or left <= 0:
                    return response
                asked, problem = _retry_after(response), f"answers HTTP {response.status}"
            except Unreachable:
                left = deadline - time.monotonic()
                if not self._has_responded or left <= 0:
                    raise
                problem = "does not respond"
            wait = min(max(asked, pause), left)
            if not warned and time.monotonic() + wait - started > _WARN_AFTER:
                warned = True
                log.warning("the API server at %s %s: waiting for up to %.0f s", self.host, problem, left)
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _send(
        self, method: str, path: str, body: Object | None, content_type: str, stream: bool
    ) -> urllib3.BaseHTTPResponse:
        # An API server that has responded before is probably restarting. Nothing was sent, so retry.
        connects = _RECONNECTS if self._has_responded else 1
        try:
            response = self._pool.request(
                method,
                self.host + path,
                body=None if body is None else json.dumps(body).encode(),
                headers={"Content-Type": content_type, "Accept": "application/json", **self._headers()},
                # A watch is silent while nothing changes, except for a bookmark every minute.
                timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT, read=3 * _READ_TIMEOUT if stream else _READ_TIMEOUT),
                retries=urllib3.Retry(
                    connect=connects,
                    read=0,
                    redirect=0,
                    status=0,
                    other=0,
                    backoff_factor=0.1,
                    backoff_max=3.0,
                    respect_retry_after_header=False,  # a response with that header would be an exception
                ),
                preload_content=not stream,
            )
        except urllib3.exceptions.HTTPError as error:
            reason = getattr(error, "reason", None) or error
            if problem := certificate_problem(reason):
                raise UntrustedCertificate(
                    f"the certificate of the API server at {self.host} is not trusted: {problem}. Check that "
                    f"{self.source} names this cluster and its CA (certificate-authority-data); if the cluster was "
                    "created again, get its kubeconfig again"
                ) from error
            raise Unreachable(
                f"the API server at {self.host} ({self.source}) does not respond: {reason}. "
                "Check that the cluster is up and reachable from here (VPN, proxy)"
            ) from error
        self._has_responded = True
        return response


def make_default(kubeconfig: Path | None) -> None:
    """What a program gets that uses the ``kubernetes`` package itself: ``kubeconfig``, or the pod's service account.

    Raises KubernetesError if it cannot be used.
    """
    credentials = _credentials()
    load = credentials.from_kubeconfig(kubeconfig) if kubeconfig else credentials.from_service_account()
    configuration, *_ = credentials.connect(*load)
    configuration.set_default(configuration)


def _credentials() -> ModuleType:
    """Imported when it is needed: worker images do without the 126 MB of the ``kubernetes`` package."""
    try:
        from meshgate_kubernetes.api import credentials  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "kubernetes":
            raise
        raise NoCluster(
            "the Python package kubernetes is not installed here, as in meshgate's worker image. Install it "
            "(pip install kubernetes), or let a gateway create the job: gateway_url= or MESHGATE_URL"
        ) from error
    return credentials


def _retry_after(response: urllib3.BaseHTTPResponse) -> float:
    """The seconds until the next attempt that the server asks for, 0 if it asks for none that can be understood."""
    with suppress(urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
        return urllib3.Retry().get_retry_after(response) or 0.0
    return 0.0


def _kind_of(obj: Object) -> Kind:
    """The kind of ``obj``, in the version that it is written in."""
    known = KINDS[obj["kind"]]
    return replace(known, api_version=obj.get("apiVersion", known.api_version))


def _namespace_of(obj: Object) -> str:
    return str(obj["metadata"]["namespace"])


def _selectors(selector: str = "", fields: str = "") -> dict[str, str]:
    return {**({"labelSelector": selector} if selector else {}), **({"fieldSelector": fields} if fields else {})}


def patient(work: Callable[Concatenate[Api, _P], _R]) -> Callable[Concatenate[Api, _P], _R]:
    """``work``, which would leave something half done if an API server that is only busy ended it."""

    @wraps(work)
    def worked(api: Api, /, *arguments: _P.args, **options: _P.kwargs) -> _R:
        with api.patiently():
            return work(api, *arguments, **options)

    return worked
