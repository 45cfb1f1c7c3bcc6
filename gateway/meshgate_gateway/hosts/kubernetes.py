"""Worker pods of a Kubernetes job as Monarch hosts.

The job's specification, in its ConfigMap, says which pods belong to a mesh. A watch keeps their current state, so that
lookups are free and a pod's end is reported with its reason within a second. Monarch itself notices much later and
never learns the reason. A pod that is being deleted remains a host for its grace period, of which there is notice. So
does one that a kubelet ends by itself, as when its node shuts down.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeAlias
from urllib.parse import urlsplit

import async_timeout
from pydantic import BaseModel, Field

from meshgate_gateway.hosts.provider import Host, HostsUnavailable, OnLost, OnRestored
from meshgate_gateway.logs import EventLog
from meshgate_gateway.supervisor.link import SupervisorLink
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Forbidden, KubernetesError, NotFound, Unauthenticated
from meshgate_kubernetes.manifests.names import Names
from meshgate_kubernetes.manifests.pods import VERSIONS_PORT_OFFSET
from meshgate_kubernetes.manifests.spec import JobSpec, MeshSpec, Object
from meshgate_kubernetes.status import discovery
from meshgate_kubernetes.status.diagnosis import examine_pod
from meshgate_kubernetes.status.discovery import grace_period, stop_period, termination_reason
from meshgate_kubernetes.status.observer import Observer, WatchTarget

log = EventLog()

READY_TIMEOUT = 600.0
OnEnding: TypeAlias = Callable[[str, str, str, float], None]
OnRemoved: TypeAlias = Callable[[str, str, str], None]
REMOVED = "job.scale() has removed it from the mesh. Call job.apply(), then job.state(), for the hosts that remain"
KEPT = "hosts of mesh "  # begins the keys of what the supervisor keeps of them
TIMEOUT = 1.0  # seconds
LATE = 5.0  # seconds after its grace period that a pod may end; on a node that is gone, it never says so
# All that Kubernetes shows of a pod that a kubelet ends by itself, until it has ended: an event, before the SIGTERM.
STOPS = WatchTarget("Event", optional=True, fields="involvedObject.kind=Pod,reason=Killing")


class KubernetesHosts:
    """A HostProvider whose hosts are pods."""

    def __init__(self, api: Api, spec: JobSpec, supervisor: SupervisorLink) -> None:
        self._spec = spec
        self._on_lost: OnLost = lambda mesh, host, reason: None
        self._on_restored: OnRestored = lambda mesh, rank, host: None
        self._on_ending: OnEnding = lambda mesh, host, reason, seconds: None
        self._on_removed: OnRemoved = lambda mesh, host, reason: None
        self._ending: dict[str, tuple[float, str]] = {}  # by uid, of pods that are being deleted: until when, and why
        self._stopping: set[str] = set()  # IDs of the containers that kubelets stop by themselves
        self._announcing: set[asyncio.Task[None]] = set()
        self._api = api
        self._loop = asyncio.get_running_loop()
        # The hosts returned by ``hosts``, by rank; None for a lost host without a replacement.
        # The supervisor keeps a copy: the next server reports what changed meanwhile.
        self._handed_out = {mesh.name: _inherited(mesh.name, supervisor) for mesh in spec.meshes}
        self._supervisor = supervisor
        self._waiting: set[asyncio.Event] = set()
        targets = [WatchTarget("Pod", mesh.selector) for mesh in spec.meshes]
        self._observer = Observer(api, spec.namespace, targets, on_change=self._on_change)
        self._observer.open()
        self._stops = Observer(api, spec.namespace, [STOPS], on_change=self._on_change)
        self._stops.open()

    def watch(self, on_lost: OnLost, on_restored: OnRestored) -> None:
        self._on_lost, self._on_restored = on_lost, on_restored

    def watch_endings(self, on_ending: OnEnding) -> None:
        """``on_ending(mesh, host, reason, seconds)`` is called when the pod of a host that ``hosts`` returned is going
        to be deleted, unless the whole job is, or a kubelet ends it."""
        self._on_ending = on_ending

    def watch_removals(self, on_removed: OnRemoved) -> None:
        """``on_removed(mesh, host, reason)`` is called when a host that ``hosts`` returned has left its mesh."""
        self._on_removed = on_removed

    def resize(self, spec: JobSpec) -> None:
        """The meshes have the numbers of hosts of ``spec`` now. The pods of removed hosts may be there for a while."""
        self._spec = spec
        for mesh in spec.meshes:
            known = self._handed_out[mesh.name]
            for rank, host in known.items():
                if host is not None and rank >= mesh.replicas:
                    known[rank] = None
                    self._on_removed(mesh.name, host.name, REMOVED)
            self._keep(mesh.name)
        self._report_changes()

    def meshes(self) -> Mapping[str, int]:
        return {mesh.name: mesh.replicas for mesh in self._spec.meshes}

    async def hosts(self, mesh: str) -> tuple[Host, ...]:
        changed = asyncio.Event()
        self._waiting.add(changed)
        try:
            async with async_timeout.timeout(READY_TIMEOUT):
                found = await self._wait_ready(mesh, changed)
        except asyncio.TimeoutError:
            raise HostsUnavailable(self._why_not_ready(self._mesh(mesh))) from None
        finally:
            self._waiting.discard(changed)
        self._report_changes()  # earlier losses come before the new hosts
        known = self._handed_out[mesh]
        known.update({host.rank: host for host in found if host.rank not in known})
        self._keep(mesh)
        ready = [_wire_host(host) for host in found]
        worker = self._mesh(mesh).worker
        if worker is not None and worker.template is None:  # the pods of a mesh have the same image
            ready[0] = await with_versions(ready[0])
        return tuple(ready)

    def present(self, mesh: str) -> Mapping[int, Host]:
        spec = self._mesh(mesh)
        return {host.rank: _wire_host(host) for host in self._present(spec)}

    def replaces_hosts(self, mesh: str) -> bool:
        return True

    def all_lost(self) -> bool:
        return False

    async def wait_ready(self) -> None:
        changed = asyncio.Event()
        self._waiting.add(changed)
        try:
            for mesh in self._spec.meshes:
                await self._wait_ready(mesh.name, changed)
        finally:
            self._waiting.discard(changed)

    async def close(self) -> None:
        for task in self._announcing:
            task.cancel()
        await asyncio.to_thread(self._observer.close)
        await asyncio.to_thread(self._stops.close)

    async def _wait_ready(self, name: str, changed: asyncio.Event) -> list[discovery.WorkerHost]:
        while True:
            changed.clear()
            mesh = self._mesh(name)  # it may be scaled meanwhile
            if (found := discovery.ready_hosts(mesh, self._pods(mesh), self._handed_out[name])) is not None:
                return found
            await changed.wait()

    def _mesh(self, name: str) -> MeshSpec:
        mesh = self._spec.mesh(name)
        assert mesh is not None, name
        return mesh

    def _pods(self, mesh: MeshSpec) -> list[Object]:
        return self._observer.objects("Pod", mesh.selector)

    def _present(self, mesh: MeshSpec) -> list[discovery.WorkerHost]:
        return discovery.present_hosts(mesh, self._pods(mesh), self._handed_out[mesh.name])

    def _why_not_ready(self, mesh: MeshSpec) -> str:
        pods = self._pods(mesh)
        ready = len(self._present(mesh))
        problems = [str(problem) for pod in pods for problem in examine_pod(pod).problems]
        summary = f"only {ready} of {mesh.replicas} pods of mesh {mesh.name!r} were ready after {READY_TIMEOUT:g} s"
        return "; ".join([summary, *problems])

    # --- changes that the watch reports -------------------------------------------------------------------

    def _on_change(self) -> None:
        """Called on a thread of the observer."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the gateway has shut down
            self._loop.call_soon_threadsafe(self._report_changes)

    def _report_changes(self) -> None:
        for changed in self._waiting:
            changed.set()
        if not self._observer.listed:
            return
        for mesh in self._spec.meshes:
            pods = self._pods(mesh)
            by_uid = {pod["metadata"]["uid"]: pod for pod in pods}
            self._report_lost(mesh.name, by_uid)
            self._report_stopping(mesh.name, by_uid)
            known = self._handed_out[mesh.name]
            for rank, host in discovery.replacement_hosts(mesh, known, pods).items():
                known[rank] = host
                log.info("host replaced", mesh=mesh.name, host=host.name, rank=rank)
                self._on_restored(mesh.name, rank, _wire_host(host))
                self._keep(mesh.name)

    def _report_lost(self, mesh: str, pods: Mapping[str, Object]) -> None:
        known = self._handed_out[mesh]
        for rank, host in known.items():
            if host is None:
                continue
            pod = pods.get(host.uid)
            if pod is not None and self._in_grace_period(mesh, host, pod):
                continue
            _, known_reason = self._ending.pop(host.uid, (0.0, "was deleted"))
            reason = known_reason if pod is None else termination_reason(pod, host.uid, host.container)
            if reason is not None:
                known[rank] = None
                log.warning("host lost", mesh=mesh, host=host.name, reason=f"its pod {reason}")
                self._on_lost(mesh, host.name, f"its pod {reason}")
                self._keep(mesh)

    def _in_grace_period(self, mesh: str, host: discovery.WorkerHost, pod: Object) -> bool:
        seconds = grace_period(pod, host.container)
        if seconds and host.uid not in self._ending:
            reason = termination_reason(pod, host.uid, host.container) or ""
            self._ending[host.uid] = self._loop.time() + seconds + LATE, reason
            self._loop.call_later(seconds + LATE, self._report_changes)
            self._give_notice(mesh, host, f"its pod {reason}", seconds, ("ConfigMap", Names(self._spec.name).parent))
        return bool(seconds) and self._loop.time() < self._ending[host.uid][0]

    def _report_stopping(self, mesh: str, pods: Mapping[str, Object]) -> None:
        known = {host.uid: host for host in self._handed_out[mesh].values() if host is not None}
        for event in self._stops.objects("Event"):
            host = known.get(event["involvedObject"].get("uid", ""))
            if host is None or host.container in self._stopping or host.uid not in pods:
                continue
            if seconds := stop_period(pods[host.uid], host.container, event):
                self._stopping.add(host.container)
                reason = f"the kubelet of its node is stopping it ({event.get('message')})"
                # A deletion has a notice of its own, but this watch may be ahead of that of pods.
                self._give_notice(mesh, host, reason, seconds, ("Pod", host.name))

    def _give_notice(
        self, mesh: str, host: discovery.WorkerHost, reason: str, seconds: float, unless: tuple[str, str]
    ) -> None:
        task = self._loop.create_task(self._announce(mesh, host, reason, seconds, unless))
        self._announcing.add(task)
        task.add_done_callback(self._announcing.discard)

    async def _announce(
        self, mesh: str, host: discovery.WorkerHost, reason: str, seconds: float, unless: tuple[str, str]
    ) -> None:
        """``unless``: the kind and the name of an object whose deletion makes this notice superfluous."""
        try:
            found = await asyncio.to_thread(self._api.get, *unless, self._spec.namespace)
            superfluous = "deletionTimestamp" in found["metadata"]
        except NotFound:
            superfluous = True
        except KubernetesError as error:
            # The gateway's role and account are deleted with the job, often before its pods.
            superfluous = isinstance(error, (Forbidden, Unauthenticated))
            log.warning(
                "cannot find out whether an object is being deleted",
                name=unless[1],
                reason=str(error),
                notice_given=not superfluous,
            )
        if not superfluous and host in self._handed_out[mesh].values():  # else it has ended meanwhile
            log.warning("host will end", mesh=mesh, host=host.name, reason=reason, seconds=seconds)
            self._on_ending(mesh, host.name, reason, seconds)

    def _keep(self, mesh: str) -> None:
        known = self._handed_out[mesh]
        note = {str(rank): None if host is None else dataclasses.asdict(host) for rank, host in known.items()}
        self._supervisor.keep(KEPT + mesh, note)


def _inherited(mesh: str, supervisor: SupervisorLink) -> dict[int, discovery.WorkerHost | None]:
    kept = supervisor.kept.get(KEPT + mesh)
    note = {} if kept is None else kept.note
    return {int(rank): None if host is None else discovery.WorkerHost(**host) for rank, host in note.items()}


def _wire_host(host: discovery.WorkerHost) -> Host:
    return Host(name=host.name, address=host.address, identity=host.identity, node=host.node, zone=host.zone)


# Asks a pod for the versions of its worker: a Monarch of another release does not answer, and so names none.
#
# The pods that meshgate creates answer on a port of their own (``WORKER_BOOTSTRAP`` of ``meshgate_kubernetes``).


class _Versions(BaseModel):
    python: str = Field(max_length=64)
    monarch: str = Field(max_length=64)


async def with_versions(host: Host) -> Host:
    """``host`` with the versions that it reports. If it reports none, as with an older client, they stay unknown."""
    try:
        async with async_timeout.timeout(TIMEOUT):
            versions = await _ask(host)
    except (OSError, ValueError, asyncio.TimeoutError):
        return host
    return host.model_copy(update=versions.model_dump())


async def _ask(host: Host) -> _Versions:
    place = urlsplit(host.address)
    reader, writer = await asyncio.open_connection(place.hostname, (place.port or 0) + VERSIONS_PORT_OFFSET)
    try:
        return _Versions.model_validate_json(await reader.readline())
    finally:
        writer.close()
