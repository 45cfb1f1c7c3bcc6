"""Names, labels and selectors of the objects of a job, validated before anything is created.

Kubernetes reports an invalid name late, some only when a controller uses it: a StatefulSet with a name of more than 52
characters is accepted but never gets a pod, because the label that its controller derives from the name is too long.
All limits are therefore checked here.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

JOB_LABEL = "meshgate.dev/job"
MESH_LABEL = "meshgate.dev/mesh"
COMPONENT_LABEL = "app.kubernetes.io/component"
# The components of a job beside its workers: a gateway with engines, or those that forward and the engines' pod.
GATEWAY, FORWARDER, ENGINES = "gateway", "forwarder", "engines"
POD_INDEX_LABEL = "apps.kubernetes.io/pod-index"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

# The pods of a StatefulSet carry the label controller-revision-hash=NAME-<10 characters>, at most 63 characters long.
MAX_STATEFUL_SET_NAME = 52
MAX_JOB_NAME = 40

_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
LABEL_RULE = "at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends"
_SET = re.compile(r"(\S+)\s+(in|notin)\s*\(([^()]*)\)")
_EQUAL = re.compile(r"([^=!\s]+)\s*(==|=|!=)\s*(.*)")


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
    def wheel(self) -> str:
        """The Secret with what a gateway's pod installs itself."""
        return f"{self.job}-wheel"

    @property
    def gateway(self) -> str:
        """The gateway's ServiceAccount, Role, RoleBinding and Service."""
        return f"{self.job}-gateway"

    def deployment(self, component: str) -> str:
        """The Deployment, NetworkPolicy and PodDisruptionBudget of a component of the gateway."""
        return f"{self.job}-engines" if component == ENGINES else self.gateway

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

    def gateway_selector(self) -> str:
        """The label selector of the pods of the job except its workers."""
        return f"{self.selector()},!{MESH_LABEL}"


# Label selectors in the syntax of ``kubectl -l``, and as objects. Pure.
#
# An invalid selector is rejected here, before half of a job is created. So are ``>`` and ``<``, which a NetworkPolicy
# does not support.


class _Term(NamedTuple):
    key: str
    operator: str  # Equal, In, NotIn, Exists or DoesNotExist
    values: tuple[str, ...] = ()


def parse_selector(selector: str) -> dict[str, str]:
    """The ``key=value`` terms of a label selector, without its other terms. Raises ValueError if the selector is
    empty or invalid."""
    return {term.key: term.values[0] for term in _terms(selector) if term.operator == "Equal"}


def selector_object(selector: str) -> dict[str, Any]:
    """A label selector as an object. Raises ValueError like ``parse_selector``."""
    terms = list(_terms(selector))
    equalities = {term.key: term.values[0] for term in terms if term.operator == "Equal"}
    expressions = [
        {"key": term.key, "operator": term.operator, **({"values": list(term.values)} if term.values else {})}
        for term in terms
        if term.operator != "Equal"
    ]
    return {
        **({"matchLabels": equalities} if equalities else {}),
        **({"matchExpressions": expressions} if expressions else {}),
    }


def _terms(selector: str) -> Iterator[_Term]:
    if not selector.strip():
        raise ValueError("the label selector is empty: it would match every pod of the namespace")
    for text in re.split(r",(?![^(]*\))", selector):
        term = _term(text.strip())
        if term is None or not is_label_key(term.key):
            raise ValueError(
                f"invalid label selector {selector!r}: {text.strip()!r} must be key=value, key!=value, "
                "key in (a, b), key notin (a, b), key or !key"
            )
        for value in term.values:
            if not is_label_value(value):
                raise ValueError(f"invalid value {value!r} of label {term.key!r}: use {LABEL_RULE}")
        yield term


def _term(text: str) -> _Term | None:
    if match := _SET.fullmatch(text):
        values = tuple(value.strip() for value in match[3].split(","))
        return _Term(match[1], "In" if match[2] == "in" else "NotIn", values)
    if match := _EQUAL.fullmatch(text):
        return _Term(match[1], "NotIn" if match[2] == "!=" else "Equal", (match[3].strip(),))
    if text.startswith("!"):
        return _Term(text[1:].strip(), "DoesNotExist")
    return _Term(text, "Exists") if text else None
