"""Connects a gateway to its Kubernetes cluster: the job it belongs to, and the jobs it provisions for others."""

from __future__ import annotations

import asyncio
from pathlib import Path

from meshgate_gateway.hosts.kubernetes import KubernetesHosts
from meshgate_gateway.hosts.provider import HostProvider
from meshgate_gateway.http.auth import Authenticator, TokenAuthenticator
from meshgate_gateway.http.kubernetes_auth import KubernetesAuthenticator, KubernetesUsers
from meshgate_gateway.provisioning.policy import read_policy
from meshgate_gateway.provisioning.service import Provisioner
from meshgate_gateway.supervisor.link import SupervisorLink
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import NotFound
from meshgate_kubernetes.jobs.objects import read_spec
from meshgate_kubernetes.manifests.names import Names
from meshgate_kubernetes.manifests.spec import JobSpec

__all__ = ["ClusterJob", "create_provisioner"]

KEPT = "kubernetes job"  # the key of what the supervisor keeps


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
        self._api, self._supervisor = api, supervisor
        if kept := supervisor.kept.get(KEPT):
            self._spec, self._uid = JobSpec.model_validate_json(kept.note["spec"]), str(kept.note["uid"])
        else:
            self._spec, self._uid = read_spec(api, job, namespace)
            supervisor.keep(KEPT, {"spec": self._spec.model_dump_json(), "uid": self._uid})

    @classmethod
    def of_this_pod(cls, job: str, supervisor: SupervisorLink) -> ClusterJob:
        """The job of this name in this pod's namespace."""
        api = Api.in_cluster()
        return cls(api, job, api.namespace, supervisor)

    def hosts(self) -> HostProvider:
        return KubernetesHosts(self._api, self._spec, self._supervisor)

    def authenticator(self, token: TokenAuthenticator) -> Authenticator:
        return KubernetesAuthenticator(token, KubernetesUsers(self._api), self._spec.namespace)

    async def delete(self) -> None:
        """Requests the deletion of the job and everything it owns, this pod included."""
        try:
            await asyncio.to_thread(self._delete)
        except NotFound:
            return

    def _delete(self) -> None:
        parent = Names(self._spec.name).parent
        self._api.delete("ConfigMap", parent, self._spec.namespace, propagation="Foreground", uid=self._uid)
