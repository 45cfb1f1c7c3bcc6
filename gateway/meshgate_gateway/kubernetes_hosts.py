"""The hosts of a job in Kubernetes: worker pods, found and followed through the API.

Which pods are a mesh's, and in which order, is told by the job's specification, which is in its ConfigMap. A watch
keeps the present state, so that asking costs nothing, and so that a pod that ends is known, with the reason, within
the second: Monarch alone would take many to notice, and never knows why.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import structlog

from meshgate_gateway.hosts import Host, HostsUnavailable, OnLost
from meshgate_kubernetes import discovery
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.gateway_pod import why_lost
from meshgate_kubernetes.observe import Observer, Source
from meshgate_kubernetes.spec import JobSpec, MeshSpec, Object
from meshgate_kubernetes.waiting import diagnose

__all__ = ["KubernetesHosts"]

log = structlog.get_logger()

READY_TIMEOUT = 600.0


class KubernetesHosts:
    """A HostProvider whose hosts are pods."""

    def __init__(self, api: Api, spec: JobSpec, on_lost: OnLost = lambda mesh, host, why: None) -> None:
        """``on_lost(mesh, host, why)`` is called on the loop when a host that was handed out has ended."""
        self._spec, self._on_lost = spec, on_lost
        self._loop = asyncio.get_running_loop()
        self._handed_out: dict[str, dict[str, discovery.Host]] = {mesh.name: {} for mesh in spec.meshes}
        self._waiting: set[asyncio.Event] = set()
        sources = [Source("Pod", mesh.selector) for mesh in spec.meshes]
        self._observer = Observer(api, spec.namespace, sources, on_change=self._changed)
        self._observer.open()

    def watch(self, on_lost: OnLost) -> None:
        self._on_lost = on_lost

    def meshes(self) -> Mapping[str, int]:
        return {mesh.name: mesh.replicas for mesh in self._spec.meshes}

    async def hosts(self, mesh: str) -> tuple[Host, ...]:
        asked = self._mesh(mesh)
        changed = asyncio.Event()
        self._waiting.add(changed)
        try:
            found = await asyncio.wait_for(self._wait_ready(asked, changed), READY_TIMEOUT)
        except asyncio.TimeoutError:
            raise HostsUnavailable(self._why_not_ready(asked)) from None
        finally:
            self._waiting.discard(changed)
        self._handed_out[mesh] = {host.uid: host for host in found}
        return tuple(Host(name=host.name, address=host.address) for host in found)

    def present(self, mesh: str) -> tuple[Host, ...]:
        asked = self._mesh(mesh)
        found = discovery.present_hosts(asked, self._pods(asked))
        return tuple(Host(name=host.name, address=host.address) for host in found)

    async def close(self) -> None:
        await asyncio.to_thread(self._observer.close)

    async def _wait_ready(self, mesh: MeshSpec, changed: asyncio.Event) -> list[discovery.Host]:
        while True:
            changed.clear()
            if (found := discovery.ready_hosts(mesh, self._pods(mesh))) is not None:
                return found
            await changed.wait()

    def _mesh(self, name: str) -> MeshSpec:
        mesh = self._spec.mesh(name)
        assert mesh is not None, name
        return mesh

    def _pods(self, mesh: MeshSpec) -> list[Object]:
        return self._observer.objects("Pod", mesh.selector)

    def _why_not_ready(self, mesh: MeshSpec) -> str:
        pods = self._pods(mesh)
        ready = len(discovery.present_hosts(mesh, pods))
        told = [str(problem) for problem in diagnose(pods, [], missing={})]
        return "; ".join(
            [f"{ready} of {mesh.replicas} pods of mesh {mesh.name!r} were ready after {READY_TIMEOUT:g} s", *told]
        )

    # --- what the watch tells -----------------------------------------------------------------------------

    def _changed(self) -> None:
        """Called on a thread of the observer."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is this gateway
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        for changed in self._waiting:
            changed.set()
        pods = {pod["metadata"]["uid"]: pod for pod in self._observer.objects("Pod")}
        for mesh, hosts in self._handed_out.items():
            for host in [*hosts.values()]:
                pod = pods.get(host.uid)
                why = "was deleted" if pod is None else why_lost(pod, host.uid, host.container)
                if why is not None:
                    del hosts[host.uid]
                    log.warning("a host is lost", mesh=mesh, host=host.name, reason=f"its pod {why}")
                    self._on_lost(mesh, host.name, f"its pod {why}")
