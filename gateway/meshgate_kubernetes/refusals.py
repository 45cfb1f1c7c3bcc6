"""What an API server's refusal means, for a person: its HTTP answer in, an error out. Pure."""

from __future__ import annotations

import json
import re
from contextlib import suppress

from meshgate_kubernetes.errors import Conflict, Forbidden, KubernetesError, NotFound, Refused, Unauthenticated
from meshgate_kubernetes.spec import Object

__all__ = ["refusal"]

_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?:(?P<path_verb>\S+) path "(?P<path>[^"]*)"'
    r'|(?P<verb>\S+) resource "(?P<resource>[^"]*)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]*)")?)'
)


def refusal(code: int, data: bytes, *, host: str, source: str, request: str) -> KubernetesError:
    """The error behind an answer of 400 or more to ``request`` (``POST /api/v1/…``), sent with the credentials of
    ``source``."""
    status = _status(data)
    message, reason = str(status.get("message") or data.decode(errors="replace")).strip(), status.get("reason")
    match code:
        case 401:
            return Unauthenticated(
                f"the API server at {host} does not accept the credentials of {source}: they have "
                "expired or belong to another cluster. Log in again, then check with `kubectl auth can-i get pods`"
            )
        case 403 if denied := _FORBIDDEN.search(message):
            return _denied(denied, host, source)
        case 404 if (details := status.get("details") or {}).get("kind") == "namespaces":
            name = details.get("name", "")
            return NotFound(
                f"there is no namespace {name!r} in the cluster at {host}: make it (kubectl create namespace {name}), "
                "or name another"
            )
        case 404:
            return NotFound(message)
        case 409 if reason in ("AlreadyExists", "Conflict"):
            return Conflict(message)
        case _:
            return Refused(f"{message} (HTTP {code} to {request})")


def _denied(denied: re.Match[str], host: str, source: str) -> KubernetesError:
    if denied["user"] == "system:anonymous":
        return Unauthenticated(
            f"{source} gives no credentials that the API server at {host} knows: log in, or see whether the "
            "program that it names for them (users[].user.exec) runs"
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
