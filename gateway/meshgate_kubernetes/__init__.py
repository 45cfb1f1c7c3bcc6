"""What meshgate knows about Kubernetes, for the client and for the gateway alike.

Both make, watch and delete the objects of a job: the client from a laptop with a kubeconfig, the gateway for
a pod that has no rights of its own. They may not import each other, so what they share lives here, a layer
below. ``api`` is the only module of the whole distribution that speaks to a Kubernetes API server; the rest
turns a job into objects (``manifests``), reads what the cluster says about them (``waiting``), or joins the
two (``provision``).
"""

from __future__ import annotations

from meshgate_kubernetes.spec import JobSpec, MeshSpec, WorkerSpec

__all__ = ["JobSpec", "MeshSpec", "WorkerSpec"]
