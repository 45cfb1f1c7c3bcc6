"""A cluster, as a driver with rights in it sees it: makes jobs, finds them again, reaches and ends them.

Everything that needs the API server is behind this module, so that importing ``meshgate`` costs none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meshgate.dialing import Dialer
from meshgate.errors import JobError, JobNotRunning, JobStartFailed
from meshgate.kubernetes.asked import JobAsked
from meshgate.kubernetes.dialer import PodDialer, PortForwardDialer, WatchedUrlDialer
from meshgate.kubernetes.progress import choose_display, told_when_up
from meshgate_kubernetes import jobs
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import Forbidden, KubernetesError, NoCluster, NotFound
from meshgate_kubernetes.jobs import RunningJob
from meshgate_kubernetes.names import generate_job_name

__all__ = ["Cluster"]

_ASK_A_GATEWAY = ". A pod has no rights of its own: set MESHGATE_URL to a gateway that makes jobs for others"


class Cluster:
    """The cluster that a kubeconfig, or the pod that this process runs in, leads to."""

    names_its_job = False

    def __init__(self, api: Api, *, inside: bool, url: str | None, ca: str | None) -> None:
        """``url``: of an ingress to the gateways of jobs; without one they are reached by a port-forward."""
        self._api, self._inside = api, inside
        self._url, self._ca = url, ca

    @classmethod
    def find(cls, kubeconfig: str | None, *, url: str | None = None, ca: str | None = None) -> Cluster:
        """By ``kubeconfig``, or as kubectl would, or from inside. Raises JobError when there is no way to one."""
        try:
            return cls(Api.from_kubeconfig(kubeconfig), inside=False, url=url, ca=ca)
        except NoCluster as error:
            if kubeconfig is not None:
                raise JobError(str(error)) from error
            outside = error
        try:
            return cls(Api.in_cluster(), inside=True, url=url, ca=ca)
        except NoCluster as error:
            raise JobError(
                f"no Kubernetes cluster is known here: {outside}; and this is no pod ({error}). Set KUBECONFIG, or "
                "MESHGATE_URL to a gateway that is there already"
            ) from error

    def start(self, asked: JobAsked) -> RunningJob:
        """Makes the job, or takes the one of its name if that is the same, and waits until it is up.

        Raises JobStartFailed, with nothing left behind.
        """
        spec = asked.spec(asked.name or generate_job_name("meshgate"))
        with choose_display(f"{spec.namespace}/{spec.name}") as display:
            try:
                forward = not self._inside and self._url is None
                running = jobs.start(self._api, spec, display, timeout=asked.timeout, forward=forward)
            except Forbidden as error:
                raise JobStartFailed(f"{error}{_ASK_A_GATEWAY if self._inside else ''}") from error
            except KubernetesError as error:
                raise JobStartFailed(str(error)) from error
            display.done(told_when_up(running.meshes, spec.idle_timeout))
        return running

    def find_job(self, name: str | None, namespace: str) -> RunningJob:
        """The running job of this name. Raises JobNotRunning."""
        if name is None:
            raise JobError("which job? Name it with KubernetesJob(name=…)")
        try:
            return jobs.find(self._api, name, namespace)
        except NotFound as error:
            raise JobNotRunning(f"there is no job {name!r} in namespace {namespace!r}") from error
        except KubernetesError as error:
            raise JobError(str(error)) from error

    def runs(self, job: RunningJob) -> bool:
        """Whether the job is there still. Raises JobError when nobody can tell."""
        with _as_job_error():
            return jobs.runs(self._api, job)

    def end(self, job: RunningJob) -> None:
        """Returns when nothing of the job is left. Harmless when nothing was."""
        with choose_display(f"{job.namespace}/{job.name}") as display:
            display.doing("is being removed")
            try:
                jobs.end(self._api, job)
            except KubernetesError as error:
                left = f"job {job.name!r} in namespace {job.namespace!r} may be there still"
                raise JobError(f"{error}\n{left}: `meshgate kill -n {job.namespace} {job.name}` ends it") from error
            display.done("is gone")

    def dialer(self, job: RunningJob) -> Dialer:
        if self._url is not None:
            return WatchedUrlDialer(self._api, job.name, job.namespace, job.token, self._url, ca=self._ca)
        kind = PodDialer if self._inside else PortForwardDialer
        return kind(self._api, job.name, job.namespace, job.token)


@contextmanager
def _as_job_error() -> Iterator[None]:
    try:
        yield
    except KubernetesError as error:
        raise JobError(str(error)) from error
