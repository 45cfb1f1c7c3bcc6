"""Proxies of what runs on the cluster, and the client that creates them.

A proxy exists before the gateway has heard of its object: its shape is computed here, and calls name exactly its ranks.

The order of the modules, from the top: ``client``, ``host_and_proc_mesh`` (one module, since host meshes spawn process
meshes and a process knows its host), ``actor_mesh``, ``endpoints``, ``kept``, ``ports`` and ``mesh``. Proxies
send through a ``ClientSession``; they never touch the connection or a socket.
"""

from __future__ import annotations

from meshgate.proxies.actor_mesh import ActorMeshProxy
from meshgate.proxies.endpoints import Accumulator, EndpointProxy, send
from meshgate.proxies.host_and_proc_mesh import HostMesh, HostMeshProxy, ProcMesh, ProcMeshProxy
from meshgate.proxies.mesh import MeshProxy

__all__ = [
    "Accumulator",
    "ActorMeshProxy",
    "EndpointProxy",
    "HostMesh",
    "HostMeshProxy",
    "MeshProxy",
    "ProcMesh",
    "ProcMeshProxy",
    "send",
]
