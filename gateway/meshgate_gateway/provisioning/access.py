"""Identifies a caller, and decides which jobs it may create, use, scale and end: one rule for requests and for
forwarded connections.

An answer shows that a job exists, and whose it is, only to callers that could create jobs in its namespace themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeAlias

from meshgate_gateway.http.auth import Denied, Identity, TokenAuthenticator, bearer_token
from meshgate_gateway.http.kubernetes_auth import KubernetesUser, KubernetesUsers
from meshgate_gateway.http.messages import Request
from meshgate_gateway.provisioning.policy import Policy
from meshgate_gateway.provisioning.refusals import matches, not_a_submitter
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Forbidden, NotFound, Unreachable
from meshgate_kubernetes.jobs import lifecycle
from meshgate_kubernetes.jobs.lifecycle import ListedJob, replaced

USE = {"verb": "create", "resource": "pods", "subresource": "exec"}
END = {"verb": "delete", "resource": "statefulsets", "group": "apps"}
SCALE = {"verb": "patch", "resource": "statefulsets", "group": "apps"}
_PURPOSES = {"create": "using", "patch": "scaling", "delete": "ending"}
CREATE = {"verb": "create", "resource": "statefulsets", "group": "apps"}


@dataclass(frozen=True, slots=True)
class TokenHolder:
    """A caller with the gateway's own token: its permissions are not checked, but the policy applies."""


Caller: TypeAlias = KubernetesUser | TokenHolder


def owner_name(caller: Caller) -> str:
    """The owner recorded in a job. No name of a Kubernetes identity can equal that of the token."""
    return "token" if isinstance(caller, TokenHolder) else f"kubernetes:{caller.name}"


class Access:
    """The policy and the permissions of the cluster, asked about a caller. Reasons are for the caller to read."""

    def __init__(self, api: Api, policy: Policy, token: TokenAuthenticator, users: KubernetesUsers) -> None:
        self._api, self._policy, self._token, self._users = api, policy, token, users

    async def identify(self, request: Request) -> Caller | Denied:
        result = await self._token.authenticate(request)
        presented = bearer_token(request)
        if isinstance(result, Identity):
            return TokenHolder()
        return result if presented is None else await self._users.identify(presented)

    def sharing_groups(self, caller: Caller) -> tuple[str, ...]:
        """The caller's groups whose members use each other's jobs."""
        groups = () if isinstance(caller, TokenHolder) else caller.groups
        return tuple(group for group in groups if matches(group, self._policy.sharing_groups))

    async def why_not_create(self, caller: Caller, namespace: str) -> str | None:
        """Why the caller may not create jobs in the namespace; None if the policy or its own permissions allow it."""
        if isinstance(caller, TokenHolder) or self._is_caller(caller):
            return None
        denied = await self._missing(caller, CREATE, namespace)
        return denied.reason if denied is not None else None

    async def why_not(
        self, caller: Caller, name: str, namespace: str, needed: dict[str, str], uid: str = ""
    ) -> Denied | None:
        """Why the caller may not use (``USE``), scale (``SCALE``) or end (``END``) the job; None for its owner, for
        members of a group that the owner shares it with, and for callers with permission of their own. Raises NotFound,
        to callers that may know, if there is no such job, or it has another ``uid`` (if that is not empty), and
        Forbidden if the gateway itself may not read it."""
        missing: NotFound | Forbidden = NotFound(
            f"there is no job {name!r} in namespace {namespace!r} (it may have ended)"
        )
        try:
            job = await asyncio.to_thread(lifecycle.read_listed, self._api, name, namespace)
        except NotFound:
            job = None
        except Forbidden as error:  # a namespace in which this gateway creates no jobs
            job, missing = None, error
        if job is not None and uid not in ("", job.uid):
            job, missing = None, replaced(name, namespace)
        try:
            may_know = await self._may_know(caller, namespace)
        except Unreachable as error:  # it must not make the owner a stranger, whose session ends
            return Denied(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
        if may_know and job is None:
            raise missing
        if isinstance(caller, TokenHolder) or (may_know and job is not None and self._shares(caller, job)):
            return None
        purpose = f"{_PURPOSES[needed['verb']]} jobs of others"
        denied = await self._users.check_permission(caller, {**needed, "namespace": namespace}, purpose)
        if denied is None and job is None:
            raise missing
        if denied is None or not may_know or job is None:
            return denied
        return Denied(f"job {name!r} in namespace {namespace!r} {_whose(job)}, and {denied.reason}", denied.status)

    def why_not_submit(self, caller: Caller) -> str | None:
        """Why the caller may not submit programs to jobs that it may use; None if the policy allows it."""
        if isinstance(caller, TokenHolder) or _is_named(caller, self._policy.submitters):
            return None
        return not_a_submitter(owner_name(caller), self._policy.submitters)

    async def usable(self, caller: Caller, jobs: Iterable[ListedJob]) -> list[ListedJob]:
        """Those of ``jobs`` that the caller may use. Raises Unreachable if the API server cannot check that now."""
        if isinstance(caller, TokenHolder):
            return list(jobs)
        rights: dict[str, tuple[bool, bool]] = {}  # by namespace: to its own jobs, to all jobs
        found = []
        for job in jobs:
            if job.namespace not in rights:
                every = await self._is_allowed(caller, USE, job.namespace)
                rights[job.namespace] = await self._may_know(caller, job.namespace), every
            own, every = rights[job.namespace]
            if every or (own and self._shares(caller, job)):
                found.append(job)
        return found

    async def _may_know(self, caller: Caller, namespace: str) -> bool:
        """Whether the caller may know which jobs are in the namespace: if it could create some there. Raises
        Unreachable if the API server cannot check that now."""
        if isinstance(caller, TokenHolder):
            return True
        if self._is_caller(caller) and matches(namespace, self._policy.namespaces):
            return True
        return await self._is_allowed(caller, CREATE, namespace)

    def _is_caller(self, caller: KubernetesUser) -> bool:
        return _is_named(caller, self._policy.callers)

    def _shares(self, caller: KubernetesUser, job: ListedJob) -> bool:
        return owner_name(caller) == job.owner or not {*self.sharing_groups(caller)}.isdisjoint(job.groups)

    async def _is_allowed(self, caller: KubernetesUser, needed: dict[str, str], namespace: str) -> bool:
        denied = await self._missing(caller, needed, namespace)
        if denied is not None and denied.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise Unreachable(denied.reason)
        return denied is None

    async def _missing(self, caller: KubernetesUser, needed: dict[str, str], namespace: str) -> Denied | None:
        return await self._users.check_permission(caller, {**needed, "namespace": namespace}, "this request")


def _is_named(caller: KubernetesUser, patterns: tuple[str, ...]) -> bool:
    return any(matches(name, patterns) for name in (caller.name, *caller.groups))


def _whose(job: ListedJob) -> str:
    return f"belongs to {job.owner}" if job.owner else "was created with a kubeconfig"
