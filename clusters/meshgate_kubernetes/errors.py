"""The errors of the Kubernetes package, and which of them an answer of an API server means. Pure.

::

    KubernetesError
    ├── NoCluster            no usable kubeconfig, and this process does not run in a pod
    ├── OtherCluster         neither the context nor the current one leads to the API server it did
    ├── Unreachable          the API server does not respond
    ├── NotKubernetes        the server that responds is another
    ├── UntrustedCertificate  the API server's certificate does not verify
    ├── Unauthenticated      it does not accept the credentials (expired token, foreign certificate)
    ├── Forbidden            the user lacks a permission: verb, resource, namespace
    ├── NotFound             the object does not exist
    ├── Conflict             the object exists already, or has changed meanwhile
    └── Rejected             the object is invalid, over quota or rejected by an admission controller; or the server
                             is too busy
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

BUSY = (429, 503)  # the API server, or a proxy before it, has not begun to handle the request


class KubernetesError(Exception):
    """Base class of all errors of this package. ``str()`` is a sentence or a few lines for people."""


class NoCluster(KubernetesError):
    pass


class OtherCluster(KubernetesError):
    pass


class Unreachable(KubernetesError):
    pass


class NotKubernetes(KubernetesError):
    pass


class UntrustedCertificate(KubernetesError):
    pass


class Unauthenticated(KubernetesError):
    pass


class NotFound(KubernetesError):
    pass


class Conflict(KubernetesError):
    pass


class Rejected(KubernetesError):
    pass


class Forbidden(KubernetesError):
    """``user`` may not ``verb`` ``resource`` (``resource.group``, with its subresource) in ``namespace``."""

    def __init__(self, verb: str, resource: str, namespace: str, *, user: str = "", detail: str = "") -> None:
        self.verb = verb
        self.resource = resource
        self.namespace = namespace
        self.user = user
        scope = f" in namespace {namespace!r}" if namespace else ""
        message = f"{user or 'the current user'} may not {verb} {resource}{scope}"
        super().__init__(f"{message}: {detail}" if detail else message)


_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?:(?P<path_verb>\S+) path "(?P<path>[^"]*)"'
    r'|(?P<verb>\S+) resource "(?P<resource>[^"]*)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]*)")?)'
)


def rejection_error(code: int, data: bytes, *, host: str, source: str, request: str) -> KubernetesError:
    """The error for a response of status 400 or more to ``request`` (``POST /api/v1/…``), sent with the credentials of
    ``source``."""
    status = _status(data)
    message, reason = str(status.get("message") or data.decode(errors="replace")).strip(), status.get("reason")
    match code:
        case 401:
            return Unauthenticated(
                f"the API server at {host} does not accept the credentials of {source}: they have "
                "expired or are for another cluster. Log in again; `kubectl auth can-i get pods` checks them"
            )
        case 403 if denied := _denied(message, host, source):
            return denied
        case 404 if (details := status.get("details") or {}).get("kind") == "namespaces":
            name = details.get("name", "")
            return NotFound(
                f"namespace {name!r} does not exist in the cluster at {host}: create it "
                f"(kubectl create namespace {name}) or choose another"
            )
        case 404:
            return NotFound(message)
        case 409 | 410 if reason in ("AlreadyExists", "Conflict", "Expired", "Gone"):
            return Conflict(message)
        case _:
            return Rejected(f"{message} (HTTP {code} for {request}){_remedy(code, message)}")


def _remedy(code: int, message: str) -> str:
    if code in BUSY:
        return ". The API server, or a proxy before it, is overloaded or restarting: try again later"
    if "because it is being terminated" in message:
        return ". Choose another namespace, or wait until this one is gone and create it again"
    return ""


def is_status(data: bytes) -> bool:
    """Whether the body of a response is a Status, as that of every error of an API server for one of its objects."""
    return _status(data).get("kind") == "Status"


def _denied(message: str, host: str, source: str) -> KubernetesError | None:
    if "attempting to grant RBAC permissions" in message:
        return Forbidden("create", "roles.rbac.authorization.k8s.io", "", detail=message)
    denied = _FORBIDDEN.search(message)
    if denied is None:
        return None
    if denied["user"] == "system:anonymous":
        return Unauthenticated(
            f"{source} provides no credentials for the API server at {host}: log in, or check that its "
            "credential plugin (users[].user.exec) works"
        )
    if denied["path"]:
        return Forbidden(denied["path_verb"], denied["path"], "", user=denied["user"])
    resource = f"{denied['resource']}.{denied['group']}" if denied["group"] else denied["resource"]
    return Forbidden(denied["verb"], resource, denied["namespace"] or "", user=denied["user"])


def _status(data: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        parsed = json.loads(data)
        if isinstance(parsed, dict):
            return parsed
    return {}
