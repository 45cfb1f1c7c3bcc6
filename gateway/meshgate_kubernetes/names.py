"""Names and labels of the objects of a job, checked before anything is created.

Kubernetes refuses a bad name only when it sees it, and some only once a controller tries to use it: a
StatefulSet whose name is longer than 52 characters is accepted and never gets a pod, because the label its
controller derives from the name does not fit. Every limit is therefore held here, locally and by name.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

__all__ = [
    "JOB_LABEL",
    "MESH_LABEL",
    "Names",
    "check_job_name",
    "check_mesh_name",
    "generate_job_name",
    "is_label_key",
    "is_label_value",
    "is_object_name",
]

JOB_LABEL = "meshgate.dev/job"
MESH_LABEL = "meshgate.dev/mesh"
COMPONENT_LABEL = "app.kubernetes.io/component"
POD_INDEX_LABEL = "apps.kubernetes.io/pod-index"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

# A pod of StatefulSet NAME carries controller-revision-hash=NAME-<10 characters>, at most 63 of them.
MAX_STATEFUL_SET_NAME = 52
MAX_JOB_NAME = 40

_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def check_job_name(name: str) -> str:
    """``name``, or ValueError: it becomes the name of Services, which are DNS labels that start with a letter."""
    if not isinstance(name, str) or not _DNS_LABEL.fullmatch(name):
        raise ValueError(
            f"job name {name!r} is invalid: it must consist of lower-case letters, digits and '-', "
            "start with a letter and end with a letter or digit"
        )
    if len(name) > MAX_JOB_NAME:
        raise ValueError(f"job name {name!r} is invalid: {len(name)} characters, at most {MAX_JOB_NAME} fit")
    return name


def check_mesh_name(name: str) -> str:
    """``name``, or ValueError, with the rules and the words of Monarch's ``add_mesh``."""
    if not isinstance(name, str):
        raise TypeError(f"a mesh's name is text, not {name!r}")
    if not name:
        raise ValueError("Empty mesh name is invalid.")
    if len(name) > 63:
        raise ValueError(f"Mesh name '{name}' is invalid. Name must contain at most 63 characters.")
    if not (name.isascii() and name.isalnum() and name.islower()):
        raise ValueError(f"Mesh name '{name}' is invalid. Name must contain only lowercase alphanumeric characters.")
    if not name[0].isalpha():
        raise ValueError(f"Mesh name '{name}' is invalid. Name must start with an alphabetic character.")
    if name == "gateway":
        raise ValueError("Mesh name 'gateway' is taken: the job's own gateway is called so.")
    return name


def generate_job_name(stem: str) -> str:
    """A fresh name that starts with what is usable of ``stem``."""
    clean = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-").lstrip("0123456789-")
    return f"{clean[: MAX_JOB_NAME - 7].strip('-') or 'meshgate'}-{secrets.token_hex(3)}"


def is_object_name(name: str) -> bool:
    return _OBJECT_NAME.fullmatch(name) is not None


def is_label_value(value: str) -> bool:
    return _LABEL_VALUE.fullmatch(value) is not None


def is_label_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    if slash and not _LABEL_PREFIX.fullmatch(prefix):
        return False
    return bool(name) and is_label_value(name)


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a job's objects, all derived from the job's own."""

    job: str

    @property
    def parent(self) -> str:
        """The ConfigMap that owns everything else and holds the job's specification."""
        return self.job

    @property
    def secret(self) -> str:
        return f"{self.job}-token"

    @property
    def gateway(self) -> str:
        """The gateway's ServiceAccount, Role, RoleBinding, Deployment, Service and NetworkPolicy."""
        return f"{self.job}-gateway"

    @property
    def workers(self) -> str:
        """The NetworkPolicy of the worker pods."""
        return f"{self.job}-workers"

    def mesh(self, mesh: str) -> str:
        """The StatefulSet (or MonarchMesh) of a mesh, and its headless Service.

        ValueError when the two names together are longer than a StatefulSet's may be.
        """
        name = f"{self.job}-{mesh}"
        if len(name) > MAX_STATEFUL_SET_NAME:
            raise ValueError(
                f"the names of job {self.job!r} and mesh {mesh!r} are too long together: "
                f"{name!r} has {len(name)} characters, a StatefulSet's name at most {MAX_STATEFUL_SET_NAME}"
            )
        return name

    def selector(self) -> str:
        """The label selector that finds every object of the job."""
        return f"{JOB_LABEL}={self.job}"
