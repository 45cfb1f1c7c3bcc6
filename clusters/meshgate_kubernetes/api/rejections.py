"""What an API server's rejection_error means, for a person: its HTTP answer in, an error out. Pure."""

from __future__ import annotations

import json
import re
from contextlib import suppress

from meshgate_kubernetes.errors import (
    Conflict,
    Forbidden,
    KubernetesError,
    NotFound,
    Rejected,
    Unauthenticated,
)
from meshgate_kubernetes.manifests.spec import Object

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
        case 403 if denied := _FORBIDDEN.search(message):
            return _denied(denied, host, source)
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
            return Rejected(f"{message} (HTTP {code} for {request})")


def is_status(data: bytes) -> bool:
    """Whether the body of a response is a Status, as that of every error of an API server for one of its objects."""
    return _status(data).get("kind") == "Status"


def _denied(denied: re.Match[str], host: str, source: str) -> KubernetesError:
    if denied["user"] == "system:anonymous":
        return Unauthenticated(
            f"{source} provides no credentials for the API server at {host}: log in, or check that its "
            "credential plugin (users[].user.exec) works"
        )
    if denied["path"]:
        return Forbidden(denied["path_verb"], denied["path"], "", user=denied["user"])
    resource = f"{denied['resource']}.{denied['group']}" if denied["group"] else denied["resource"]
    return Forbidden(denied["verb"], resource, denied["namespace"] or "", user=denied["user"])


def _status(data: bytes) -> Object:
    with suppress(ValueError):
        parsed = json.loads(data)
        if isinstance(parsed, dict):
            return parsed
    return {}
