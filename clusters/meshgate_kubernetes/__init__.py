"""Jobs in Kubernetes, for the client and the gateway.

Both create, watch and delete the objects of a job: the client with a kubeconfig, the gateway for callers without
permissions of their own. ``manifests`` turns a job into objects, ``api`` is the only part of the distribution that
calls a Kubernetes API server, ``status`` diagnoses pods, and ``jobs`` creates, finds and deletes jobs.
"""

from __future__ import annotations

from meshgate_kubernetes.manifests.spec import JobSpec, MeshSpec, WorkerSpec

__all__ = ["JobSpec", "MeshSpec", "WorkerSpec"]
