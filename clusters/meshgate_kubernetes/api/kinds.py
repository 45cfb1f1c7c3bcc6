"""The API paths of the kinds that meshgate uses. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind with its ``apiVersion`` and its plural name in API paths."""

    name: str
    api_version: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def resource(self) -> str:
        """The name that kubectl prints: ``statefulsets.apps``."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, name: str = "") -> str:
        """Of the objects, or of one of them. Namespace ``""`` stands for all namespaces."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        scope = f"/namespaces/{quote(namespace, safe='')}" if self.namespaced and namespace else ""
        return f"{root}{scope}/{self.plural}" + (f"/{quote(name, safe='')}" if name else "")


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("ConfigMap", "v1", "configmaps"),
        Kind("Event", "v1", "events"),
        Kind("Node", "v1", "nodes", namespaced=False),
        Kind("Pod", "v1", "pods"),
        Kind("Secret", "v1", "secrets"),
        Kind("Service", "v1", "services"),
        Kind("ServiceAccount", "v1", "serviceaccounts"),
        Kind("Deployment", "apps/v1", "deployments"),
        Kind("ReplicaSet", "apps/v1", "replicasets"),
        Kind("StatefulSet", "apps/v1", "statefulsets"),
        Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies"),
        Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets"),
        Kind("Role", "rbac.authorization.k8s.io/v1", "roles"),
        Kind("RoleBinding", "rbac.authorization.k8s.io/v1", "rolebindings"),
        Kind("MonarchMesh", "monarch.pytorch.org/v1alpha1", "monarchmeshes"),
    )
}
