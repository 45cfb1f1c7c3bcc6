"""A gateway as the gateway of a Kubernetes job: what it takes from the cluster, and how it ends the job from inside."""

from __future__ import annotations

import asyncio
from pathlib import Path

from meshgate_gateway.auth import Authenticator, TokenAuthenticator
from meshgate_gateway.hosts import HostProvider
from meshgate_gateway.kubernetes_auth import KubernetesAuthenticator, KubernetesUsers
from meshgate_gateway.kubernetes_hosts import KubernetesHosts
from meshgate_gateway.policy import read_policy
from meshgate_gateway.provisioning import Provisioner
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import NotFound
from meshgate_kubernetes.names import Names
from meshgate_kubernetes.provision import read_spec

__all__ = ["InCluster", "provisioner"]


async def provisioner(policy: Path, token: TokenAuthenticator) -> Provisioner:
    """What provisions jobs for others, with the rights of this pod's service account.

    Raises ValueError when the policy cannot be used, KubernetesError outside a cluster.
    """
    api = await asyncio.to_thread(Api.in_cluster)
    return Provisioner(api, read_policy(policy), token, KubernetesUsers(api))


class InCluster:
    """The job, as its gateway's own service account sees it."""

    def __init__(self, api: Api, job: str, namespace: str) -> None:
        """Blocks. Raises KubernetesError, NotFound when there is no such job."""
        self._api = api
        self._spec, self._uid = read_spec(api, job, namespace)

    @classmethod
    def of_this_pod(cls, job: str) -> InCluster:
        """The job of this name in the namespace of the pod that this process runs in."""
        api = Api.in_cluster()
        return cls(api, job, api.namespace)

    def hosts(self) -> HostProvider:
        return KubernetesHosts(self._api, self._spec)

    def authenticator(self, token: TokenAuthenticator) -> Authenticator:
        return KubernetesAuthenticator(token, KubernetesUsers(self._api), self._spec.namespace)

    async def end_job(self) -> None:
        """Asks for the deletion of everything that belongs to the job, this very pod included."""
        try:
            await asyncio.to_thread(self._delete)
        except NotFound:
            return

    def _delete(self) -> None:
        parent = Names(self._spec.name).parent
        self._api.delete("ConfigMap", parent, self._spec.namespace, propagation="Foreground", uid=self._uid)
