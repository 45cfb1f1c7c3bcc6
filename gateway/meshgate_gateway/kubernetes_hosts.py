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

from meshgate_gateway.hosts import Host, HostsUnavailable, OnBack, OnLost
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

    def __init__(self, api: Api, spec: JobSpec) -> None:
        self._spec = spec
        self._on_lost: OnLost = lambda mesh, host, why: None
        self._on_back: OnBack = lambda mesh, rank, host: None
        self._loop = asyncio.get_running_loop()
        # By rank, since they were asked for: None where one has ended and there is none in its place yet.
        self._handed_out: dict[str, dict[int, discovery.Host | None]] = {mesh.name: {} for mesh in spec.meshes}
        self._waiting: set[asyncio.Event] = set()
        sources = [Source("Pod", mesh.selector) for mesh in spec.meshes]
        self._observer = Observer(api, spec.namespace, sources, on_change=self._changed)
        self._observer.open()

    def watch(self, on_lost: OnLost, on_back: OnBack) -> None:
        self._on_lost, self._on_back = on_lost, on_back

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
        self._look()  # what those before have to be told comes before what is new
        known = self._handed_out[mesh]
        known.update({host.rank: host for host in found if host.rank not in known})
        return tuple(_told(host) for host in found)

    def present(self, mesh: str) -> tuple[Host, ...]:
        asked = self._mesh(mesh)
        found = discovery.present_hosts(asked, self._pods(asked))
        return tuple(_told(host) for host in found)

    def made_anew(self, mesh: str) -> bool:
        return True

    async def came_up(self) -> None:
        changed = asyncio.Event()
        self._waiting.add(changed)
        try:
            for mesh in self._spec.meshes:
                await self._wait_ready(mesh, changed)
        finally:
            self._waiting.discard(changed)

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
        for mesh in self._spec.meshes:
            pods = self._pods(mesh)
            self._look_for_lost(mesh.name, {pod["metadata"]["uid"]: pod for pod in pods})
            known = self._handed_out[mesh.name]
            for rank, host in discovery.successors(mesh, known, pods).items():
                known[rank] = host
                log.info("a host is back", mesh=mesh.name, host=host.name, rank=rank)
                self._on_back(mesh.name, rank, _told(host))

    def _look_for_lost(self, mesh: str, pods: Mapping[str, Object]) -> None:
        known = self._handed_out[mesh]
        for rank, host in known.items():
            if host is None:
                continue
            pod = pods.get(host.uid)
            why = "was deleted" if pod is None else why_lost(pod, host.uid, host.container)
            if why is not None:
                known[rank] = None
                log.warning("a host is lost", mesh=mesh, host=host.name, reason=f"its pod {why}")
                self._on_lost(mesh, host.name, f"its pod {why}")


def _told(host: discovery.Host) -> Host:
    return Host(name=host.name, address=host.address, node=host.node, zone=host.zone)
