"""A job in a cluster, as the laptop sees it: made, found again, reached, ended.

Everything that needs the API server is behind this module, so that importing ``meshgate`` costs none of it.
"""

from __future__ import annotations

import base64
import logging
import secrets

from pydantic import BaseModel, ConfigDict, Field

from meshgate.dialing import Dialer
from meshgate.errors import JobError, JobNotRunning, JobStartFailed
from meshgate.kubernetes.asked import JobAsked
from meshgate.kubernetes.dialer import PodDialer, PortForwardDialer, WatchedUrlDialer
from meshgate.kubernetes.progress import Display, choose_display, duration
from meshgate_kubernetes import provision
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.discovery import ranked
from meshgate_kubernetes.errors import Conflict, KubernetesError, NoCluster, NotFound
from meshgate_kubernetes.names import Names, generate_job_name
from meshgate_kubernetes.readiness import JobNotReady, wait_ready
from meshgate_kubernetes.spec import JobSpec

__all__ = ["Cluster", "RunningJob"]

log = logging.getLogger("meshgate.kubernetes")


class RunningJob(BaseModel):
    """What it takes to use and to end a job in a cluster, from any machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    namespace: str
    uid: str
    token: str = Field(repr=False)
    meshes: dict[str, int]


class Cluster:
    """The cluster that a kubeconfig, or the pod that this process runs in, leads to."""

    def __init__(self, api: Api, *, inside: bool) -> None:
        self._api = api
        self._inside = inside

    @classmethod
    def find(cls, kubeconfig: str | None) -> Cluster:
        """By ``kubeconfig``, or as kubectl would, or from inside. Raises JobError when there is no way to one."""
        try:
            return cls(Api.from_kubeconfig(kubeconfig), inside=False)
        except NoCluster as error:
            if kubeconfig is not None:
                raise JobError(str(error)) from error
            outside = error
        try:
            return cls(Api.in_cluster(), inside=True)
        except NoCluster as error:
            raise JobError(
                f"no Kubernetes cluster is known here: {outside}; and this is no pod ({error}). Set KUBECONFIG, or "
                "MESHGATE_URL to a gateway that is there already"
            ) from error

    def start(self, asked: JobAsked) -> RunningJob:
        """Makes the job, or takes the one of its name if that is the same, and waits until it is up.

        Raises JobStartFailed, with nothing left behind.
        """
        name = asked.name or generate_job_name("meshgate")
        spec = self._spec(asked, name)
        token = secrets.token_urlsafe(32)
        with choose_display(f"{asked.namespace}/{name}") as display:
            try:
                uid = self._make(spec, token, asked.timeout, display)
            except Conflict as error:
                return self._take_over(asked, spec, display, error)
            except KubernetesError as error:
                raise JobStartFailed(str(error)) from error
            display.done(_told(spec))
        return RunningJob(
            name=name,
            namespace=asked.namespace,
            uid=uid,
            token=token,
            meshes={mesh.name: mesh.replicas for mesh in spec.meshes},
        )

    def find_job(self, name: str, namespace: str) -> RunningJob:
        """The running job of this name. Raises JobNotRunning."""
        try:
            spec, uid = provision.read_spec(self._api, name, namespace)
            secret = self._api.get("Secret", Names(name).secret, namespace)
        except NotFound as error:
            raise JobNotRunning(f"there is no job {name!r} in namespace {namespace!r}") from error
        except KubernetesError as error:
            raise JobError(str(error)) from error
        token = base64.b64decode(secret["data"]["token"]).decode()
        meshes = {mesh.name: mesh.replicas for mesh in spec.meshes}
        return RunningJob(name=name, namespace=namespace, uid=uid, token=token, meshes=meshes)

    def runs(self, job: RunningJob) -> bool:
        """Whether the job is there still. Raises JobError when nobody can tell."""
        try:
            return provision.read_spec(self._api, job.name, job.namespace)[1] == job.uid
        except NotFound:
            return False
        except KubernetesError as error:
            raise JobError(str(error)) from error

    def end(self, job: RunningJob) -> None:
        """Returns when nothing of the job is left. Harmless when nothing was."""
        try:
            provision.delete(self._api, job.name, job.namespace, uid=job.uid)
        except KubernetesError as error:
            raise JobError(str(error)) from error

    def dialer(self, job: RunningJob, url: str | None, ca: str | None) -> Dialer:
        if url is not None:
            return WatchedUrlDialer(self._api, job.name, job.namespace, job.token, url, ca=ca)
        kind = PodDialer if self._inside else PortForwardDialer
        return kind(self._api, job.name, job.namespace, job.token)

    def bearer(self) -> str | None:
        return self._api.bearer()

    # --- making a job -------------------------------------------------------------------------------------

    def _spec(self, asked: JobAsked, name: str) -> JobSpec:
        try:
            monarch = any(mesh.worker for mesh in asked.meshes) and self._api.serves("MonarchMesh")
            found = {mesh.name: self._count(asked, mesh.name) for mesh in asked.meshes if not mesh.replicas}
        except KubernetesError as error:
            raise JobStartFailed(str(error)) from error
        return asked.spec(name, monarch=monarch, found=found)

    def _count(self, asked: JobAsked, name: str) -> int:
        """How many pods there are for a mesh that takes what it finds."""
        mesh = next(mesh for mesh in asked.meshes if mesh.name == name).spec("job", monarch=False)
        pods, _ = self._api.find("Pod", asked.namespace, mesh.selector)
        count = len(ranked(mesh, pods))
        if not count:
            raise JobStartFailed(f"no pod in namespace {asked.namespace!r} matches the selector {mesh.selector!r}")
        return count

    def _make(self, spec: JobSpec, token: str, timeout: float | None, display: Display) -> str:
        """Creates and waits. Whatever goes wrong from the parent's creation on, a Ctrl-C too, nothing remains."""
        uid: str | None = None
        try:
            parent = provision.create_parent(self._api, spec)
            uid = str(parent["metadata"]["uid"])
            provision.create_owned(self._api, spec, parent, token, display)
            wait_ready(self._api, spec, display, timeout)
        except BaseException:
            if uid is not None:
                self._clean_up(spec, uid)
            raise
        return uid

    def _clean_up(self, spec: JobSpec, uid: str) -> None:
        try:
            provision.delete(self._api, spec.name, spec.namespace, uid=uid)
        except KubernetesError as error:  # the reason why the job failed matters more
            log.warning("what was made of job %r could not be removed: %s", spec.name, error)

    def _take_over(self, asked: JobAsked, spec: JobSpec, display: Display, error: Conflict) -> RunningJob:
        """The job of this name that is there already, if it is what is asked for."""
        try:
            existing, _ = provision.read_spec(self._api, spec.name, spec.namespace)
        except (NotFound, ValueError):
            raise JobStartFailed(str(error)) from error
        if existing != spec:
            raise JobStartFailed(
                f"a job {spec.name!r} runs already in namespace {spec.namespace!r}, and is not what is asked for now: "
                "end it first (meshgate kill), or choose another name"
            ) from error
        try:
            wait_ready(self._api, existing, display, asked.timeout)
        except JobNotReady as reason:
            raise JobStartFailed(str(reason)) from reason
        display.done("runs already")
        return self.find_job(spec.name, spec.namespace)


def _told(spec: JobSpec) -> str:
    pods = ", ".join(f"{mesh.name} {mesh.replicas}" for mesh in spec.meshes)
    idle = f"ends itself after {duration(spec.idle_timeout)} without a session"
    return f"is up: {pods}; {idle if spec.idle_timeout else 'runs until killed'}"
