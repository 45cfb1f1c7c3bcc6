"""Names and labels of the objects of a job, validated before anything is created.

Kubernetes reports an invalid name late, some only when a controller uses it: a StatefulSet with a name of more than 52
characters is accepted but never gets a pod, because the label that its controller derives from the name is too long.
All limits are therefore checked here.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

JOB_LABEL = "meshgate.dev/job"
MESH_LABEL = "meshgate.dev/mesh"
COMPONENT_LABEL = "app.kubernetes.io/component"
POD_INDEX_LABEL = "apps.kubernetes.io/pod-index"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

# The pods of a StatefulSet carry the label controller-revision-hash=NAME-<10 characters>, at most 63 characters long.
MAX_STATEFUL_SET_NAME = 52
MAX_JOB_NAME = 40

_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def check_job_name(name: str) -> str:
    """Returns ``name``. Raises ValueError unless it is a valid Service name: a DNS label that starts with a letter."""
    if not isinstance(name, str) or not _DNS_LABEL.fullmatch(name):
        raise ValueError(
            f"invalid job name {name!r}: use lower-case letters, digits and '-', "
            "with a letter at the start and a letter or digit at the end"
        )
    if len(name) > MAX_JOB_NAME:
        raise ValueError(f"invalid job name {name!r}: it has {len(name)} characters, use at most {MAX_JOB_NAME}")
    return name


def check_mesh_name(name: str) -> str:
    """Returns ``name``. Raises ValueError with the rules and texts of Monarch's ``add_mesh``."""
    if not isinstance(name, str):
        raise TypeError(f"mesh name must be a string, not {name!r}")
    if not name:
        raise ValueError("Empty mesh name is invalid.")
    if len(name) > 63:
        raise ValueError(f"Mesh name '{name}' is invalid. Name must contain at most 63 characters.")
    if not (name.isascii() and name.isalnum() and name.islower()):
        raise ValueError(f"Mesh name '{name}' is invalid. Name must contain only lowercase alphanumeric characters.")
    if not name[0].isalpha():
        raise ValueError(f"Mesh name '{name}' is invalid. Name must start with an alphabetic character.")
    if name == "gateway":
        raise ValueError("Mesh name 'gateway' is reserved for the job's gateway.")
    return name


def generate_job_name(stem: str) -> str:
    """A new name that starts with the valid characters of ``stem``."""
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
    """The names of a job's objects, derived from the job's name."""

    job: str

    @property
    def parent(self) -> str:
        """The ConfigMap that owns all other objects and holds the job's specification."""
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

        Raises ValueError if the combined name is too long for a StatefulSet.
        """
        name = f"{self.job}-{mesh}"
        if len(name) > MAX_STATEFUL_SET_NAME:
            raise ValueError(
                f"the combined name of job {self.job!r} and mesh {mesh!r} is too long: "
                f"{name!r} has {len(name)} characters, a StatefulSet's name at most {MAX_STATEFUL_SET_NAME}"
            )
        return name

    def selector(self) -> str:
        """The label selector that finds every object of the job."""
        return f"{JOB_LABEL}={self.job}"
