"""A stand-in for the MonarchMesh operator, with a reduced CRD.

The real operator is a controller in Go. For meshgate only its objects matter: a parallel StatefulSet and a headless
Service, owned by the MonarchMesh, with its selector labels on the pods, and the status.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import KubernetesError
from meshgate_kubernetes.status.observer import Observer, WatchTarget
from tests.kubernetes.cluster import Kubectl

_NAME = {"type": "string", "pattern": "^[a-z][a-z0-9]*$", "maxLength": 63}
_ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}

CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "monarchmeshes.monarch.pytorch.org"},
    "spec": {
        "group": "monarch.pytorch.org",
        "names": {
            "kind": "MonarchMesh",
            "listKind": "MonarchMeshList",
            "plural": "monarchmeshes",
            "singular": "monarchmesh",
        },
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "metadata": {
                                "type": "object",
                                "properties": {
                                    "name": {"type": "string", "pattern": "^[a-z][a-z0-9]*$", "maxLength": 63}
                                },
                            },
                            "spec": {
                                "type": "object",
                                "required": ["replicas", "podTemplate"],
                                "properties": {
                                    "replicas": {"type": "integer"},
                                    "port": {"type": "integer", "default": 26600},
                                    "podTemplate": _ANYTHING,
                                },
                            },
                            "status": _ANYTHING,
                        },
                    }
                },
            }
        ],
    },
}


@contextmanager
def monarch_operator(kubectl: Kubectl) -> Iterator[None]:
    """Installs the CRD and runs the operator in the namespace of ``kubectl``."""
    kubectl.apply(CRD)
    kubectl("wait", "--for=condition=Established", "crd/monarchmeshes.monarch.pytorch.org", "--timeout=30s")
    api = Api.from_kubeconfig()
    stop = threading.Event()
    try:
        with Observer(api, kubectl.namespace, [WatchTarget("MonarchMesh"), WatchTarget("StatefulSet")]) as observer:
            operator = threading.Thread(target=_operate, args=(api, observer, stop))
            operator.start()
            try:
                yield
            finally:
                stop.set()
                operator.join()
    finally:
        kubectl("delete", "crd", "monarchmeshes.monarch.pytorch.org", timeout=60)


def _operate(api: Api, observer: Observer, stop: threading.Event) -> None:
    version = -1
    made: set[str] = set()  # the UIDs of meshes: the end of a StatefulSet may be seen before that of its mesh
    while not stop.is_set():
        version = observer.wait(version, timeout=0.5)
        for mesh in observer.objects("MonarchMesh"):
            if "deletionTimestamp" not in mesh["metadata"]:
                _reconcile(api, mesh, observer.objects("StatefulSet"), made)


def _reconcile(api: Api, mesh: dict[str, Any], stateful_sets: list[dict[str, Any]], made: set[str]) -> None:
    name = mesh["metadata"]["name"]
    existing = next((each for each in stateful_sets if each["metadata"]["name"] == name), None)
    if existing is None:
        if mesh["metadata"]["uid"] in made:
            return
        for obj in _objects(mesh):
            try:
                api.create(obj)
            except KubernetesError:  # it exists but is not observed yet, or the mesh is being deleted
                return
        made.add(mesh["metadata"]["uid"])
        return
    ready = existing.get("status", {}).get("readyReplicas", 0)
    if mesh.get("status", {}).get("readyReplicas") != ready:
        status = {"replicas": existing["spec"]["replicas"], "readyReplicas": ready}
        try:
            api.merge_patch("MonarchMesh", f"{name}/status", mesh["metadata"]["namespace"], {"status": status})
        except KubernetesError:
            return


def _objects(mesh: dict[str, Any]) -> list[dict[str, Any]]:
    name, spec = mesh["metadata"]["name"], mesh["spec"]
    selector = {"monarch.pytorch.org/mesh-name": name, "app.kubernetes.io/name": "monarch-worker"}
    owner = {
        "apiVersion": mesh["apiVersion"],
        "kind": "MonarchMesh",
        "name": name,
        "uid": mesh["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    head = {"namespace": mesh["metadata"]["namespace"], "ownerReferences": [owner]}
    template = spec["podTemplate"]
    labels = {**(template.get("metadata", {}).get("labels") or {}), **selector}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {**head, "name": f"{name}-svc", "labels": selector},
            "spec": {
                "clusterIP": "None",
                "selector": selector,
                "ports": [{"name": "monarch", "port": spec["port"]}],
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {**head, "name": name, "labels": {**mesh["metadata"].get("labels", {}), **selector}},
            "spec": {
                "replicas": spec["replicas"],
                "serviceName": f"{name}-svc",
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": selector},
                "template": {**template, "metadata": {**template.get("metadata", {}), "labels": labels}},
            },
        },
    ]
