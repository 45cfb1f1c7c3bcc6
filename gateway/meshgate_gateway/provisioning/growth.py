"""Changes the numbers of hosts of meshes for callers, within the operator's policy.

The policy limits growth, as it limits new jobs; hosts can always be given back. GPUs count from the beginning of a
change, so that no other job gets them while pods start, and count for the owner of the job, not for the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any

import urllib3

from meshgate_gateway.http.auth import headers_for
from meshgate_gateway.provisioning.policy import Policy, PolicyViolation, exceeded_gpus, growth_violations
from meshgate_gateway.provisioning.refusals import job_not_allowed
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Conflict, Rejected, Unreachable
from meshgate_kubernetes.jobs import lifecycle, scaling
from meshgate_kubernetes.jobs.lifecycle import ListedJob, RunningJob
from meshgate_kubernetes.jobs.provisioning_messages import ScaleJob
from meshgate_kubernetes.manifests.job_objects import with_sizes
from meshgate_kubernetes.manifests.spec import JobSpec
from meshgate_kubernetes.status.readiness import ProgressListener

ANSWER_TIMEOUT = 20.0  # seconds
SHOWN = 500  # bytes of an unexpected answer

Job = tuple[str, str]
"""Its namespace and name."""


class Growth:
    """The changes in progress, one for each job. All methods block, and raise KubernetesError."""

    def __init__(self, api: Api, policy: Policy, list_counted: Callable[[str], list[ListedJob]]) -> None:
        """``list_counted`` lists the jobs that count if one in this namespace gets more GPUs."""
        self._api, self._policy, self._list_counted = api, policy, list_counted
        self._changing: dict[Job, JobSpec | None] = {}  # what a job that grows will be

    def why_not(self, request: ScaleJob) -> str | None:
        """Why the policy does not allow the change; None if it does. Raises NotFound."""
        try:
            spec, _ = lifecycle.read_current(self._api, request.name, request.namespace)
        except Rejected:  # another version of meshgate created the job, as ``change`` says
            return None
        mesh = spec.mesh(request.mesh)
        if mesh is None or mesh.way != "statefulset" or request.hosts <= mesh.replicas:
            return None
        return self._refusal(request, with_sizes(spec, {mesh.name: request.hosts}))

    def change(self, request: ScaleJob, caller: str, listener: ProgressListener) -> RunningJob:
        """The job, without its token, once its mesh has the number of hosts."""
        job = lifecycle.find(self._api, request.name, request.namespace)
        job = job.model_copy(update={"uid": request.uid or job.uid})
        with self._changes(job):
            scaled = scaling.scale(
                self._api,
                job,
                request.mesh,
                request.hosts,
                listener,
                timeout=request.timeout,
                ask_gateway=partial(_ask, self._api, job, caller),
                require_allowed=partial(self._require_allowed, request),
            )
        return scaled.without_token()

    def counted(self, jobs: Iterable[ListedJob]) -> list[ListedJob]:
        """``jobs``, with the GPUs that those that grow will have."""
        growing = dict(self._changing)
        return [
            job if spec is None else job.model_copy(update={"gpus": spec.gpu_count})
            for job in jobs
            for spec in [growing.get((job.namespace, job.name))]
        ]

    @contextmanager
    def _changes(self, job: RunningJob) -> Iterator[None]:
        key = job.namespace, job.name
        if key in self._changing:
            raise Conflict("another request is changing its number of hosts: repeat this one when that has ended")
        self._changing[key] = None
        try:
            yield
        finally:
            del self._changing[key]

    def _require_allowed(self, request: ScaleJob, grown: JobSpec) -> None:
        self._changing[request.namespace, request.name] = grown  # before others are counted, or both could fit alone
        if refused := self._refusal(request, grown):
            raise PolicyViolation(refused)

    def _refusal(self, request: ScaleJob, grown: JobSpec) -> str | None:
        mesh = grown.mesh(request.mesh)
        assert mesh is not None
        owner = lifecycle.read_listed(self._api, request.name, request.namespace).owner
        problems = growth_violations(self._policy, grown, mesh)
        if owner:  # else it was created with a kubeconfig, and its GPUs count for no caller
            jobs = self.counted(self._list_counted(request.namespace))
            problems += filter(None, [exceeded_gpus(self._policy, grown, owner, jobs)])
        return job_not_allowed(problems)


def _ask(api: Api, job: RunningJob, caller: str, path: str, body: bytes | None) -> Any:
    """An ``AskGateway`` on behalf of ``caller``."""
    pod = lifecycle.find_gateway(api, job.name, job.namespace)
    if pod is None:
        raise Unreachable("the job's gateway is not ready: repeat the request in a while")
    try:
        with urllib3.PoolManager(headers=headers_for(caller, job.token), timeout=ANSWER_TIMEOUT, retries=False) as pool:
            method = "GET" if body is None else "POST"
            response = pool.request(method, f"http://{pod.address}{path}", body=body)
        if response.status == HTTPStatus.OK:
            return response.json()
    except (urllib3.exceptions.HTTPError, ValueError) as error:
        raise Unreachable(f"the job's gateway did not answer {path}: {error}") from error
    answer = response.data[:SHOWN].decode(errors="replace")
    raise Rejected(f"the job's gateway answered {path} with HTTP {response.status}: {answer}")
