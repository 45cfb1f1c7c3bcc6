"""The errors of the Kubernetes package.

::

    KubernetesError
    ├── NoCluster            no usable kubeconfig, and this process does not run in a pod
    ├── Unreachable          the API server does not respond
    ├── NotKubernetes        the server that responds is another
    ├── UntrustedCertificate  the API server's certificate does not verify
    ├── Unauthenticated      it does not accept the credentials (expired token, foreign certificate)
    ├── Forbidden            the user lacks a permission: verb, resource, namespace
    ├── NotFound             the object does not exist
    ├── Conflict             the object exists already, or has changed meanwhile
    └── Rejected             the object is invalid, over quota or rejected by an admission controller
"""

from __future__ import annotations


class KubernetesError(Exception):
    """Base class of all errors of this package. ``str()`` is a sentence or a few lines for people."""


class NoCluster(KubernetesError):
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
