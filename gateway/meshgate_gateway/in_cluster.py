"""Connects a gateway to its Kubernetes cluster: the job it belongs to, and the jobs it provisions for others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import async_timeout

from meshgate_gateway.hosts.kubernetes import KubernetesHosts
from meshgate_gateway.hosts.provider import HostsUnavailable
from meshgate_gateway.http.auth import Authenticator, TokenAuthenticator
from meshgate_gateway.http.forwarding import Address, EnginesUnavailable
from meshgate_gateway.http.kubernetes_auth import KubernetesAuthenticator, KubernetesUsers
from meshgate_gateway.logs import EventLog
from meshgate_gateway.provisioning.policy import read_policy
from meshgate_gateway.provisioning.service import Provisioner
from meshgate_gateway.supervisor.link import SupervisorLink
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import KubernetesError, NotFound
from meshgate_kubernetes.jobs.lifecycle import GatewayPod, find_engines
from meshgate_kubernetes.jobs.objects import read_parent, read_spec
from meshgate_kubernetes.manifests.job_objects import asked_spec
from meshgate_kubernetes.manifests.names import Names
from meshgate_kubernetes.manifests.pods import GATEWAY_CONTAINER
from meshgate_kubernetes.manifests.spec import JobSpec
from meshgate_kubernetes.status.discovery import restart_reason

log = EventLog()

KEPT = "kubernetes job"  # the key of what the supervisor keeps
RESTART_REASON_TIMEOUT = 3.0  # seconds; a list of sessions does not wait longer for the API server


async def create_provisioner(policy: Path, token: TokenAuthenticator) -> Provisioner:
    """A provisioning service that acts with the permissions of this pod's service account.

    Raises ValueError if the policy is unusable, KubernetesError outside a cluster.
    """
    api = await asyncio.to_thread(Api.in_cluster)
    return Provisioner(api, read_policy(policy), token, KubernetesUsers(api))


class ClusterJob:
    """The Kubernetes job of this gateway, seen with the permissions of the gateway's service account."""

    def __init__(self, api: Api, job: str, namespace: str, supervisor: SupervisorLink) -> None:
        """Blocks. Raises KubernetesError; NotFound if there is no such job.

        A further server of the gateway takes the job from the supervisor, and so starts while the API server is down.
        """
        self._api, self._supervisor, self._reading = api, supervisor, asyncio.Lock()
        if kept := supervisor.kept.get(KEPT):
            self._spec, self._uid = JobSpec.model_validate_json(kept.note["spec"]), str(kept.note["uid"])
            self._created_with = dict(kept.note["created_with"])
        else:
            self._spec, parent = read_parent(api, job, namespace)
            self._uid = str(parent["metadata"]["uid"])
            self._created_with = {mesh.name: mesh.replicas for mesh in asked_spec(parent).meshes}
            self._keep()

    @classmethod
    def of_this_pod(cls, job: str, supervisor: SupervisorLink) -> ClusterJob:
        """The job of this name in this pod's namespace."""
        api = Api.in_cluster()
        return cls(api, job, api.namespace, supervisor)

    @property
    def name(self) -> Mapping[str, str]:
        """What identifies the job in the audit log."""
        return {"job": self._spec.name, "namespace": self._spec.namespace}

    def facts(self) -> dict[str, Any]:
        """What ``/v1/job`` reports of it: the numbers of hosts before it was scaled."""
        return {"created_with": self._created_with}

    def hosts(self) -> KubernetesHosts:
        return KubernetesHosts(self._api, self._spec, self._supervisor)

    async def read_sizes(self, hosts: KubernetesHosts) -> None:
        """Has ``hosts`` use the numbers of hosts that the meshes of the job have been scaled to. Raises
        HostsUnavailable."""
        async with self._reading:  # else an older answer could come last
            try:
                spec, _ = await asyncio.to_thread(read_spec, self._api, self._spec.name, self._spec.namespace)
            except (KubernetesError, ValueError) as error:
                raise HostsUnavailable(f"the gateway cannot read the specification of its job: {error}") from error
            self._spec = spec
            self._keep()
            hosts.resize(spec)

    def _keep(self) -> None:
        note = {"spec": self._spec.model_dump_json(), "uid": self._uid, "created_with": self._created_with}
        self._supervisor.keep(KEPT, note)

    def authenticator(self, token: TokenAuthenticator) -> Authenticator:
        return KubernetesAuthenticator(token, KubernetesUsers(self._api), self._spec.namespace)

    async def restart_reason(self) -> str:
        """Why this gateway is not the first of its job; "" if it is, or if that cannot be known."""
        try:
            async with async_timeout.timeout(RESTART_REASON_TIMEOUT):
                return await asyncio.to_thread(self._restart_reason)
        except (KubernetesError, ValueError, asyncio.TimeoutError) as error:
            log.warning("cannot find out whether an earlier gateway was replaced", reason=repr(error))
            return ""

    def _restart_reason(self) -> str:
        _, parent = read_parent(self._api, self._spec.name, self._spec.namespace)
        pod = self._api.get("Pod", socket.gethostname(), self._spec.namespace)
        return restart_reason(pod, GATEWAY_CONTAINER, parent["metadata"]["creationTimestamp"])

    async def delete(self) -> None:
        """Requests the deletion of the job and everything it owns, this pod included."""
        try:
            await asyncio.to_thread(self._delete)
        except NotFound:
            return

    def _delete(self) -> None:
        parent = Names(self._spec.name).parent
        with self._api.patiently():
            self._api.delete("ConfigMap", parent, self._spec.namespace, propagation="Foreground", uid=self._uid)


class EnginesOfJob:
    """Where the engines of a Kubernetes job are, for the gateways in front of them."""

    def __init__(self, api: Api, job: str, namespace: str) -> None:
        self._api, self._job, self._namespace = api, job, namespace
        self._last: GatewayPod | None = None

    @classmethod
    def of_this_namespace(cls, job: str) -> EnginesOfJob:
        """Raises KubernetesError outside a cluster."""
        api = Api.in_cluster()
        return cls(api, job, api.namespace)

    @property
    def name(self) -> Mapping[str, str]:
        """What identifies the job in the audit log."""
        return {"job": self._job, "namespace": self._namespace}

    def authenticator(self, token: TokenAuthenticator) -> Authenticator:
        return KubernetesAuthenticator(token, KubernetesUsers(self._api), self._namespace)

    async def find(self) -> Address:
        """Raises EnginesUnavailable. While the API server does not answer, the engines are where they were."""
        try:
            pod = await asyncio.to_thread(find_engines, self._api, self._job, self._namespace)
        except KubernetesError as error:
            if self._last is None:
                raise EnginesUnavailable(f"this gateway cannot look for the engines of its job: {error}") from error
            log.warning("cannot look for the engines' pod, so its last address is used", reason=str(error))
            pod = self._last
        if pod is None:
            raise EnginesUnavailable(f"the pod with the engines of job {self._job!r} is not ready")
        self._last = pod
        return pod.host, pod.port
