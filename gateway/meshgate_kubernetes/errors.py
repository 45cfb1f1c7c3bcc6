"""What can go wrong between meshgate and a Kubernetes API server.

::

    KubernetesError
    ├── NoCluster            there is no usable kubeconfig, and this is not a pod
    ├── Unreachable          the API server does not answer
    ├── Unauthenticated      it does not know the caller (an expired token, a foreign certificate)
    ├── Forbidden            it knows the caller, who lacks a right: verb, resource, namespace
    ├── NotFound             the object is not there
    ├── Conflict             it is there already, or was changed meanwhile
    └── Refused              the object is invalid, over quota or refused by admission
"""

from __future__ import annotations

__all__ = [
    "Conflict",
    "Forbidden",
    "KubernetesError",
    "NoCluster",
    "NotFound",
    "Refused",
    "Unauthenticated",
    "Unreachable",
]


class KubernetesError(Exception):
    """Base of all errors of this package. ``str()`` is one sentence or a few lines for a person."""


class NoCluster(KubernetesError):
    pass


class Unreachable(KubernetesError):
    pass


class Unauthenticated(KubernetesError):
    pass


class NotFound(KubernetesError):
    pass


class Conflict(KubernetesError):
    pass


class Refused(KubernetesError):
    pass


class Forbidden(KubernetesError):
    """``user`` may not ``verb`` ``resource`` (``resource.group``, with its subresource) in ``namespace``."""

    def __init__(self, verb: str, resource: str, namespace: str, *, user: str = "", detail: str = "") -> None:
        self.verb = verb
        self.resource = resource
        self.namespace = namespace
        self.user = user
        who = f"{user or 'the current user'} may not"
        where = f" in namespace {namespace!r}" if namespace else ""
        super().__init__(f"{who} {verb} {resource}{where}" + (f": {detail}" if detail else ""))
