"""A cluster that this driver may use directly: starts, finds, reaches and ends jobs through the API server.

Everything that needs the API server is imported from here, so ``import meshgate`` does not load it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshgate.errors import JobError, JobNotRunning, JobStartFailed
from meshgate.jobs.kubernetes.display import cannot_scale, choose_display, ready_message
from meshgate.jobs.kubernetes.port_forward import ForwardFailed, open_forward
from meshgate.jobs.kubernetes.requests import JobRequest
from meshgate.session.dialing import Dialer, Route, UrlDialer, call_in_thread
from meshgate.session.gateway_client import request_json
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Forbidden, KubernetesError, NoCluster, NotFound, OtherCluster
from meshgate_kubernetes.jobs import lifecycle, scaling
from meshgate_kubernetes.jobs.lifecycle import GatewayPod, ListedJob, RunningJob, find_gateway, gateway_gone_reason
from meshgate_kubernetes.manifests.names import generate_job_name

_USE_A_GATEWAY = ". To start jobs from a pod without these permissions, set MESHGATE_URL to a provisioning gateway"


class Cluster:
    """The cluster of a kubeconfig, or of the pod that this process runs in."""

    name_is_optional = False

    def __init__(self, api: Api, *, inside: bool, url: str | None) -> None:
        """``url``: an ingress in front of the jobs' gateways; without it they are reached by port-forward."""
        self._api, self._inside, self._url = api, inside, url

    @classmethod
    def find(cls, kubeconfig: str | None, *, url: str | None = None, context: str = "", server: str = "") -> Cluster:
        """Uses ``kubeconfig``, or kubectl's default, or the pod's service account. Raises JobError if none works.

        ``context`` and ``server``: where a saved job was started; the kubeconfig must still lead there. Inside a
        cluster they say nothing: the API server has another address there.
        """
        try:
            return cls(Api.from_kubeconfig(kubeconfig, context, server), inside=False, url=url)
        except NoCluster as error:
            if kubeconfig is not None:
                raise JobError(str(error)) from error
            outside = error
        except OtherCluster as error:
            raise JobError(
                f"cannot reach the cluster of this job: {error}. To start a job in another cluster, or to find one by "
                "its name, pass another cached_path to state(), or remove the job file"
            ) from None
        except KubernetesError as error:
            raise JobError(str(error)) from None
        try:
            return cls(Api.in_cluster(), inside=True, url=url)
        except NoCluster as error:
            raise JobError(
                f"no Kubernetes cluster found: {outside}, and this process does not run in a pod ({error}). Set "
                "KUBECONFIG, or set MESHGATE_URL to a running gateway"
            ) from error

    @property
    def place(self) -> dict[str, str]:
        """What ``find`` needs to find this cluster again."""
        return {} if self._inside else {"context": self._api.context, "server": self._api.host}

    def start(self, request: JobRequest, created: Callable[[RunningJob], None] = lambda job: None) -> RunningJob:
        """Creates the job, or finds an identical one of its name, and waits until it is ready.

        ``created`` is called once a new job exists. Raises JobStartFailed and leaves nothing behind.
        """
        spec = request.spec(request.name or generate_job_name("meshgate"))
        with choose_display(f"{spec.namespace}/{spec.name}") as display:
            try:
                forward = not self._inside and self._url is None
                running = lifecycle.start(
                    self._api,
                    spec,
                    display,
                    timeout=request.timeout,
                    forward=forward,
                    on_new=created,
                    meanwhile=_import_proxies,
                )
            except Forbidden as error:
                raise JobStartFailed(f"{error}{_USE_A_GATEWAY if self._inside else ''}") from None
            except KubernetesError as error:
                raise JobStartFailed(str(error)) from None
            except KeyboardInterrupt:
                raise KeyboardInterrupt from None  # without the frames of the wait that it interrupted
            display.done(ready_message(running.meshes, spec.idle_timeout))
        return running

    def find_job(self, name: str | None, namespace: str) -> RunningJob:
        """The running job of this name. Raises JobNotRunning."""
        if name is None:
            raise JobError("cannot look up a job without its name: pass KubernetesJob(name=…)")
        try:
            return lifecycle.find(self._api, name, namespace)
        except NotFound as error:
            raise JobNotRunning(f"there is no job {name!r} in namespace {namespace!r}") from error
        except KubernetesError as error:
            raise JobError(str(error)) from error

    def list_jobs(self, namespace: str = "") -> list[ListedJob]:
        """The jobs of a namespace, or of all. Raises JobError."""
        try:
            return lifecycle.list_jobs(self._api, namespace)
        except Forbidden as error:
            hint = "" if error.namespace else " in all namespaces; name one namespace with -n NAMESPACE"
            raise JobError(f"{error}{hint}") from error
        except KubernetesError as error:
            raise JobError(str(error)) from error

    def refreshed(self, job: RunningJob) -> RunningJob | None:
        """The job as it is now; None if it does not exist. Raises JobError if that is unknown."""
        with _as_job_error():
            return lifecycle.refreshed(self._api, job)

    def scale(self, job: RunningJob, mesh: str, hosts: int, timeout: float) -> RunningJob:
        """The job with ``hosts`` hosts in ``mesh``. Raises JobError and GatewayError."""
        ask = functools.partial(request_json, self.dialer(job))
        with choose_display(f"{job.namespace}/{job.name}") as display:
            try:
                scaled = scaling.scale(self._api, job, mesh, hosts, display, timeout=timeout, ask_gateway=ask)
            except KubernetesError as error:
                raise JobError(cannot_scale(job, mesh, hosts, error)) from error
            display.done(f"has {hosts} hosts in mesh {mesh!r}")
        return scaled

    def end(self, job: RunningJob | ListedJob, *, quiet: bool = False) -> None:
        """Deletes the job and waits until all its objects are gone. May be called again."""
        with choose_display(f"{job.namespace}/{job.name}", quiet=quiet) as display:
            display.activity("is being deleted")
            try:
                lifecycle.end(self._api, job)
            except KubernetesError as error:
                raise JobError(
                    f"cannot end job {job.name!r} in namespace {job.namespace!r}: {error}\nIts pods may still be "
                    f"running; to end it, run `meshgate kill -n {job.namespace} {job.name}`"
                ) from error
            display.done("is deleted")

    def dialer(self, job: RunningJob) -> Dialer:
        if self._url is not None:
            return WatchedUrlDialer(self._api, job.name, job.namespace, job.token, self._url)
        kind = PodDialer if self._inside else PortForwardDialer
        return kind(self._api, job.name, job.namespace, job.token)


def _import_proxies() -> None:
    """What ``state()`` needs, and would take a quarter of a second for: now pods are starting anyway."""
    import meshgate.proxies.client  # noqa: F401, PLC0415


@contextmanager
def _as_job_error() -> Iterator[None]:
    try:
        yield
    except KubernetesError as error:
        raise JobError(str(error)) from error


# All of them ask the API server what happened if the gateway does not answer. A session lives in one gateway process,
# or in the engines' pod behind those that forward. Once the one that was reached first has ended, its session is lost,
# and the API server knows how the pod ended.


class _WatchedGateway:
    """The gateway pod of ``job`` as the API server reports it."""

    def __init__(self, api: Api, job: str, namespace: str) -> None:
        self._api = api
        self._job = job
        self._namespace = namespace
        self._first: GatewayPod | None = None

    async def find(self) -> GatewayPod:
        """The pod to dial now. Raises ForwardFailed if there is none."""
        try:
            pod = await call_in_thread(find_gateway, self._api, self._job, self._namespace)
        except KubernetesError as error:
            raise ForwardFailed(str(error)) from error
        if pod is None:
            raise ForwardFailed("the gateway has no ready pod")
        holder = pod.engines or pod  # gateways that forward may be replaced
        self._first = self._first or holder
        if holder != self._first:  # the new pod does not know the session; ``gone`` reports how the first one ended
            raise ForwardFailed("another gateway pod has replaced the one that held this session")
        return pod

    async def gone(self) -> str | None:
        try:
            return await call_in_thread(gateway_gone_reason, self._api, self._job, self._namespace, self._first)
        except KubernetesError:
            return None  # unknown while the API server does not answer

    def __str__(self) -> str:
        return f"the gateway of job {self._job!r} (namespace {self._namespace})"


class PodDialer:
    """Connects to the pod directly, from inside the cluster."""

    def __init__(self, api: Api, job: str, namespace: str, token: str) -> None:
        self._api = api
        self._namespace = namespace
        self._gateway = _WatchedGateway(api, job, namespace)
        self._headers = {"Authorization": f"Bearer {token}"}

    async def dial(self) -> Route:
        pod = await self._gateway.find()
        return Route(f"ws://{pod.address}", headers=self._headers, through_proxy=False)

    async def gone(self) -> str | None:
        return await self._gateway.gone()

    def __str__(self) -> str:
        return str(self._gateway)


class PortForwardDialer(PodDialer):
    """Connects to the pod by a port-forward through the API server, a new one for each connection."""

    async def dial(self) -> Route:
        pod = await self._gateway.find()
        request = await call_in_thread(self._api.port_forward, pod.name, self._namespace, pod.port)
        sock = await asyncio.wrap_future(open_forward(request))
        return Route("ws://gateway.meshgate", sock=sock, headers=self._headers, through_proxy=False)


class WatchedUrlDialer(UrlDialer):
    """Connects to the gateway by the URL of an ingress, if the API server reports a ready pod."""

    def __init__(self, api: Api, job: str, namespace: str, token: str, url: str) -> None:
        super().__init__(url, token)
        self._gateway = _WatchedGateway(api, job, namespace)

    async def dial(self) -> Route:
        await self._gateway.find()
        return await super().dial()

    async def gone(self) -> str | None:
        return await self._gateway.gone()
