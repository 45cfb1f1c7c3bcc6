"""Proxies of what lives on the cluster: meshes of hosts, of processes and of actors, and actors' endpoints.

A proxy exists before the gateway has heard of its object. Its shape is computed here; calls name exactly the ranks
that it has.
"""

from __future__ import annotations

from meshgate.proxies.actors import ActorMeshProxy, NotAnEndpoint
from meshgate.proxies.endpoints import Accumulator, EndpointProxy, send
from meshgate.proxies.hosts import HostMesh, HostMeshProxy
from meshgate.proxies.mesh import MeshProxy, Owned
from meshgate.proxies.procs import ProcMesh, ProcMeshProxy, class_of

__all__ = [
    "Accumulator",
    "ActorMeshProxy",
    "EndpointProxy",
    "HostMesh",
    "HostMeshProxy",
    "MeshProxy",
    "NotAnEndpoint",
    "Owned",
    "ProcMesh",
    "ProcMeshProxy",
    "class_of",
    "send",
]
