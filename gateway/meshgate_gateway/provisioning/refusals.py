"""What a provisioning gateway refuses, whatever the cluster: a policy's patterns, and the words for the caller."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from meshgate_gateway.http.auth import Denied, busy
from meshgate_wire.fields import first_problem

PolicyT = TypeVar("PolicyT", bound=BaseModel)


class SessionLimits(Protocol):
    """A policy. In seconds."""

    @property
    def max_idle(self) -> int: ...

    @property
    def max_lease(self) -> int: ...


def read_policy_file(path: Path, kind: type[PolicyT]) -> PolicyT:
    """Raises ValueError if the file cannot be read or is invalid."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read the policy {path}: {error}") from None
    except ValidationError as error:
        raise ValueError(f"invalid policy {path}: {first_problem(error)}") from None


def matches(value: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the shell ``patterns`` matches."""
    return any(fnmatchcase(value, pattern) for pattern in patterns)


def listed(allowed: tuple[str, ...]) -> str:
    return ", ".join(allowed) or "none"


def not_allowed(
    kind: str, values: Iterable[str], allowed: tuple[str, ...], form: re.Pattern[str] | None = None
) -> Iterator[str]:
    """A clause for each of ``values`` that ``allowed`` does not match, or that does not have the ``form``."""
    for value in values:
        if not matches(value, allowed) or (form is not None and not form.fullmatch(value)):
            yield f"{kind} {value!r} is not allowed (allowed: {listed(allowed)})"


def session_violations(limits: SessionLimits, idle_timeout: float, lease: float) -> Iterator[str]:
    """A clause for each of a job's times, in seconds, that exceeds the policy's."""
    if not 0 < idle_timeout <= limits.max_idle:
        timeout = f"{idle_timeout:.15g} s" if idle_timeout else "0 (never)"
        yield f"idle_timeout {timeout} exceeds the limit of {limits.max_idle} s"
    if lease > limits.max_lease:
        yield f"lease {lease:g} s exceeds the limit of {limits.max_lease} s"


def job_not_allowed(problems: Iterable[str]) -> str | None:
    """The refusal of a job for its ``problems``, which are clauses; None without any."""
    clauses = "; ".join(problems)
    return f"the policy of this gateway does not allow this job: {clauses}" if clauses else None


def not_a_submitter(caller: str, submitters: tuple[str, ...]) -> str:
    """The refusal of a submission."""
    return (
        f"the policy of this gateway does not allow {caller} to submit programs (submitters: {listed(submitters)}): "
        "ask its operator, or run the program where your driver runs"
    )


def at_limit(connections: int) -> Denied:
    return busy(f"this gateway is at its limit of {connections} forwarded connections: retry later")
