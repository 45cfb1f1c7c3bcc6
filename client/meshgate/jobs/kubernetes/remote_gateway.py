"""A gateway behind a URL, for a driver without permissions in the cluster.

It is either the gateway of one job, which is used as it is, or a provisioning gateway, which starts jobs within its
operator's policy, and to which the driver's own token leads back to them: it proxies connections to their gateways.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial

from meshgate.errors import AuthenticationError, GatewayError, JobError, JobNotRunning, JobStartFailed, JobUnsupported
from meshgate.jobs.kubernetes.display import SilentDisplay, cannot_scale, choose_display, ready_message
from meshgate.jobs.kubernetes.requests import JobRequest
from meshgate.jobs.tokens import find_token, token_is_renewed, token_to_dial
from meshgate.session.dialing import Dialer, UrlDialer
from meshgate.session.gateway_client import CreatesNoJobs, GatewayClient
from meshgate_kubernetes.jobs.lifecycle import ListedJob, RunningJob, replaced
from meshgate_kubernetes.jobs.provisioning_messages import (
    EndJob,
    FindJob,
    JobEnded,
    JobProgress,
    JobsListed,
    JobUp,
    ListJobs,
    ObjectCreated,
    ProvisioningReply,
    RequestRejected,
    ScaleJob,
    StartJob,
    parse_reply,
)
from meshgate_kubernetes.manifests.names import generate_job_name

END_TIMEOUT = 180.0
_UNKNOWN_SCALE = "Input tag 'scale' "
"""How a gateway from before ScaleJob begins its answer to one: with pydantic's message."""
_UNKNOWN_UID = ".uid: Extra inputs"
"""In the answer of a gateway from before the ``uid`` of EndJob and ScaleJob: pydantic's message too."""
CREATES_NONE = (
    "To use its job, omit compute=, selector= and add_mesh(); to create jobs, set MESHGATE_URL to a provisioning "
    "gateway, or use a kubeconfig"
)


class RemoteGateway(GatewayClient[ProvisioningReply, RequestRejected]):
    """One gateway, and the driver's token for it."""

    name_is_optional = True

    def __init__(self, url: str, token: str | None) -> None:
        """``token``: instead of the one that ``find_token`` finds for each connection. Raises JobError if that finds
        none now."""
        if not token:
            try:
                find_token()
            except JobError as error:
                raise JobError(f"cannot use the gateway at {url}: {error}") from None
        super().__init__(url, token or token_to_dial, parse_reply, RequestRejected, CREATES_NONE, token_is_renewed)

    def start(self, request: JobRequest, created: Callable[[RunningJob], None] = lambda job: None) -> RunningJob:
        """Starts the job through the gateway. Raises JobStartFailed, leaving nothing behind, and
        ConnectionFailedError. Does not call ``created``: until the job is ready, the gateway itself deletes it if this
        process does not wait for it any more."""
        spec = request.spec(request.name or generate_job_name("meshgate"))
        start = StartJob(job=spec, timeout=request.timeout)
        with choose_display(f"{spec.namespace}/{spec.name}") as display:
            last = self._answer(start, JobUp, progress=partial(_show, display))
            if isinstance(last, RequestRejected):
                raise JobStartFailed(f"{self._dialer}: {last.reason}")
            display.done(ready_message(last.job.meshes, spec.idle_timeout))
            return last.job

    def find_job(self, name: str | None, namespace: str) -> RunningJob:
        """The job of this gateway, or the job of this name if it is a provisioning gateway. Raises JobNotRunning."""
        if name is not None:
            try:
                return self._find_provisioned(name, namespace)
            except CreatesNoJobs:
                pass  # it has one job, whatever its name
        try:
            meshes = self._get("/v1/job")["meshes"]
        except AuthenticationError as error:  # of a provisioning gateway, the operator's token alone may ask this
            raise self._name_it(namespace, error) from None
        if not meshes:
            raise self._name_it(namespace, JobError(f"{self._dialer} has no job"))
        return RunningJob(name=name or "", namespace=namespace, uid="", token="", meshes=meshes)

    def _find_provisioned(self, name: str, namespace: str) -> RunningJob:
        reply = self._answer(FindJob(name=name, namespace=namespace), JobUp)
        if isinstance(reply, RequestRejected):
            raise (JobNotRunning if reply.missing else JobError)(f"{self._dialer}: {reply.reason}")
        return reply.job

    def _name_it(self, namespace: str, error: Exception) -> Exception:
        """What is wrong with a request for the gateway's own job: ``error``, unless it creates jobs for this caller."""
        try:
            jobs = self.list_jobs(namespace)
        except (CreatesNoJobs, AuthenticationError):
            return error
        names = ", ".join(job.name for job in jobs) or "none"
        return JobError(
            f"{self._dialer} starts jobs and has none of its own: pass KubernetesJob(name=…) to use a running one, or "
            f"compute= to start one. You may use, in namespace {namespace!r}: {names}"
        )

    def list_jobs(self, namespace: str = "") -> list[ListedJob]:
        """The jobs that this caller may use in the namespace, or in all of the gateway's. Raises CreatesNoJobs."""
        found: list[ListedJob] = []
        with closing(self._ask_with_retries(ListJobs(namespace=namespace or None))) as replies:
            for reply in replies:
                if isinstance(reply, RequestRejected):
                    raise JobError(f"{self._dialer}: {reply.reason}")
                if isinstance(reply, JobsListed):
                    found += reply.jobs
                    if not reply.more:
                        # A connection that was cut midway, and the request repeated: the newest of each job counts.
                        return list({job.uid: job for job in found}.values())
        raise AssertionError("the last reply is one of these")

    def refreshed(self, job: RunningJob) -> RunningJob | None:
        """The job as it is now; None if it does not exist. Raises GatewayError or JobError if that is unknown."""
        if not job.uid:
            meshes = self._get("/v1/job")["meshes"]
            return job.model_copy(update={"meshes": meshes}) if meshes.keys() == job.meshes.keys() else None
        try:
            found = self.find_job(job.name, job.namespace)
        except JobNotRunning:
            return None
        return job.model_copy(update={"meshes": found.meshes}) if found.uid == job.uid else None

    def scale(self, job: RunningJob, mesh: str, hosts: int, timeout: float) -> RunningJob:
        """The job with ``hosts`` hosts in ``mesh``. Raises JobError; JobUnsupported if the gateway creates no jobs."""
        if not job.uid:
            raise JobUnsupported(
                f"{self._dialer} serves one job, and cannot change the number of hosts of its meshes: scale() needs a "
                "provisioning gateway, or a kubeconfig with the permission to patch StatefulSets and ConfigMaps"
            )
        request = ScaleJob(name=job.name, namespace=job.namespace, uid=job.uid, mesh=mesh, hosts=hosts, timeout=timeout)
        with choose_display(f"{job.namespace}/{job.name}") as display:
            limit, show = timeout + END_TIMEOUT, partial(_show, display)
            last = self._answer(request, JobUp, limit, show)
            if isinstance(last, RequestRejected) and _UNKNOWN_UID in last.reason:
                if self._is_replaced(job):
                    raise JobNotRunning(f"{self._dialer}: {replaced(job.name, job.namespace)}")
                last = self._answer(request.model_copy(update={"uid": ""}), JobUp, limit, show)
            if isinstance(last, RequestRejected):
                raise JobError(cannot_scale(job, mesh, hosts, f"{self._dialer}: {self._why_not_scaled(last)}"))
            display.done(f"has {hosts} hosts in mesh {mesh!r}")
        return job.model_copy(update={"meshes": last.job.meshes})

    def _is_replaced(self, job: RunningJob | ListedJob) -> bool:
        """Whether another job of its name is listed: for gateways that do not compare the uid themselves. A job that is
        not listed may still be one that the caller may end: unlike FindJob, the list refuses no caller and no job, also
        not one that another version has created or whose Secret is gone."""
        return any(each.name == job.name and each.uid != job.uid for each in self.list_jobs(job.namespace))

    def _why_not_scaled(self, rejected: RequestRejected) -> str:
        if not rejected.reason.startswith(_UNKNOWN_SCALE):
            return rejected.reason
        try:
            version = f"meshgate {self._get('/healthz')['version']}"
        except GatewayError:  # an ingress may forward nothing but /v1
            version = "an older version of meshgate"
        return f"this gateway runs {version}, which cannot scale jobs: ask its operator to upgrade it"

    def end(self, job: RunningJob | ListedJob, *, quiet: bool = False) -> None:
        """Ends a job that the gateway started. A job whose own gateway this is keeps running."""
        if not job.uid:
            return
        request = EndJob(name=job.name, namespace=job.namespace, uid=job.uid)
        last = self._answer(request, JobEnded, END_TIMEOUT)
        if isinstance(last, RequestRejected) and _UNKNOWN_UID in last.reason:
            if self._is_replaced(job):
                return
            last = self._answer(request.model_copy(update={"uid": ""}), JobEnded, END_TIMEOUT)
        if isinstance(last, RequestRejected) and not last.missing:
            raise JobError(f"{self._dialer}: {last.reason}")

    def dialer(self, job: RunningJob) -> Dialer:
        if not job.uid:
            return self._dialer
        url = f"{self._url}/v1/jobs/{job.namespace}/{job.name}"
        return UrlDialer(url, job.token or self._token, renews_token=token_is_renewed)


def _show(display: SilentDisplay, reply: ProvisioningReply) -> None:
    if isinstance(reply, ObjectCreated):
        display.created({"kind": reply.kind, "metadata": {"name": reply.name}})
    elif isinstance(reply, JobProgress):
        display.progress(reply.progress)
