"""A gateway behind a URL, for a driver without permissions in the cluster.

It is either the gateway of one job, which is used as it is, or a provisioning gateway, which starts jobs within its
operator's policy and proxies connections to their gateways.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from meshgate.errors import JobError, JobNotRunning, JobStartFailed
from meshgate.jobs.kubernetes.display import choose_display, ready_message
from meshgate.jobs.kubernetes.requests import JobRequest
from meshgate.session.dialing import Dialer, UrlDialer
from meshgate.session.gateway_client import GatewayClient
from meshgate_kubernetes.jobs.lifecycle import RunningJob
from meshgate_kubernetes.jobs.provisioning_messages import (
    EndJob,
    FindJob,
    JobEnded,
    JobProgress,
    JobUp,
    ObjectCreated,
    ProvisioningReply,
    RequestRejected,
    StartJob,
    parse_reply,
)
from meshgate_kubernetes.manifests.names import generate_job_name

SERVICE_ACCOUNT_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
END_TIMEOUT = 180.0
CREATES_NONE = (
    "To use its job, omit compute=, selector= and add_mesh(); to create jobs, set MESHGATE_URL to a provisioning "
    "gateway, or use a kubeconfig"
)


def find_token() -> str:
    """The token for a gateway: ``$MESHGATE_TOKEN``, or that of the pod's service account."""
    if token := os.environ.get("MESHGATE_TOKEN"):
        return token.strip()
    try:
        return SERVICE_ACCOUNT_TOKEN.read_text().strip()
    except OSError:
        raise JobError("no token for the gateway of MESHGATE_URL: set MESHGATE_TOKEN as well") from None


class RemoteGateway(GatewayClient[ProvisioningReply]):
    """One gateway and its token."""

    name_is_optional = True

    def __init__(self, url: str, token: str, ca: str | None) -> None:
        super().__init__(url, token, ca, parse_reply, CREATES_NONE)

    def start(self, request: JobRequest, created: Callable[[RunningJob], None] = lambda job: None) -> RunningJob:
        """Starts the job through the gateway. Raises JobStartFailed, leaving nothing behind, and
        ConnectionFailedError. Does not call ``created``: until the job is ready, the gateway itself deletes it if this
        process does not wait for it any more."""
        spec = request.spec(request.name or generate_job_name("meshgate"))
        replies = self._ask_with_retries(StartJob(job=spec, timeout=request.timeout))
        with choose_display(f"{spec.namespace}/{spec.name}") as display, closing(replies):
            for reply in replies:
                if isinstance(reply, ObjectCreated):
                    display.created({"kind": reply.kind, "metadata": {"name": reply.name}})
                elif isinstance(reply, JobProgress):
                    display.progress(reply.progress)
                elif isinstance(reply, JobUp):
                    display.done(ready_message(reply.job.meshes, spec.idle_timeout))
                    return reply.job
                elif isinstance(reply, RequestRejected):
                    raise JobStartFailed(f"{self._dialer}: {reply.reason}")
        raise AssertionError("the last reply is one of these")

    def find_job(self, name: str | None, namespace: str) -> RunningJob:
        """The job of this gateway, or the job of this name if it is a provisioning gateway. Raises JobNotRunning."""
        about = self._get("/v1/job")
        if about["meshes"] or name is None:
            return RunningJob(name=name or "", namespace=namespace, uid="", token=self._token, meshes=about["meshes"])
        for reply in self._ask_with_retries(FindJob(name=name, namespace=namespace)):
            if isinstance(reply, JobUp):
                return reply.job
            if isinstance(reply, RequestRejected):
                raise (JobNotRunning if reply.missing else JobError)(f"{self._dialer}: {reply.reason}")
        raise AssertionError("the last reply is one of these")

    def runs(self, job: RunningJob) -> bool:
        """Whether the job still exists. Raises GatewayError or JobError if that is unknown."""
        if not job.uid:
            return bool(self._get("/v1/job")["meshes"] == job.meshes)
        try:
            return self.find_job(job.name, job.namespace).uid == job.uid
        except JobNotRunning:
            return False

    def end(self, job: RunningJob) -> None:
        """Ends a job that the gateway started. A job whose own gateway this is keeps running."""
        if not job.uid:
            return
        for reply in self._ask_with_retries(EndJob(name=job.name, namespace=job.namespace), END_TIMEOUT):
            if isinstance(reply, RequestRejected) and not reply.missing:
                raise JobError(f"{self._dialer}: {reply.reason}")
            if isinstance(reply, (RequestRejected, JobEnded)):
                return

    def dialer(self, job: RunningJob) -> Dialer:
        if not job.uid:
            return self._dialer
        return UrlDialer(f"{self._url}/v1/jobs/{job.namespace}/{job.name}", job.token, ca=self._ca)
