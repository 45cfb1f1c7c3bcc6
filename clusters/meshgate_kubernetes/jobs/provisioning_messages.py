"""The messages between a client and a provisioning gateway: JSON, one per websocket text message.

The client sends one request. The gateway reports progress and finishes with JobUp, JobsListed, JobEnded or
RequestRejected. A JobUp has no token of the job: the caller's own leads to the job through this gateway.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
)

from meshgate_kubernetes.errors import KubernetesError, NotFound
from meshgate_kubernetes.jobs.lifecycle import ListedJob, RunningJob
from meshgate_kubernetes.manifests.spec import JobName, JobSpec, Namespace
from meshgate_kubernetes.status.readiness import Progress
from meshgate_wire.fields import first_problem

MAX_MESSAGE = 1 << 20


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _ChangesJob(_Model):
    """``uid``: the request is for the job with this uid only; empty: for whichever job has the name."""

    name: JobName
    namespace: Namespace
    uid: str = Field(default="", max_length=128)

    @model_serializer(mode="wrap")
    def _omit_empty_uid(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Gateways from before ``uid`` forbid it."""
        fields: dict[str, Any] = serialize(self)
        return fields if self.uid else {key: value for key, value in fields.items() if key != "uid"}


class StartJob(_Model):
    """Start this job, or use it if it runs already."""

    ask: Literal["start"] = "start"
    job: JobSpec
    timeout: float | None = Field(default=None, ge=0)


class FindJob(_Model):
    """Find a running job."""

    ask: Literal["find"] = "find"
    name: JobName
    namespace: Namespace


class ListJobs(_Model):
    """List the jobs that the caller may use, in one namespace or in all of the gateway's."""

    ask: Literal["list"] = "list"
    namespace: Namespace | None = None


class ScaleJob(_ChangesJob):
    """Change the number of hosts of a mesh. The reply follows when new hosts are ready, or removed ones gone."""

    ask: Literal["scale"] = "scale"
    mesh: str = Field(max_length=63)
    hosts: int = Field(ge=1, le=1_000_000)
    timeout: float = Field(gt=0, allow_inf_nan=False)


class EndJob(_ChangesJob):
    """End a job. The reply follows when it is gone."""

    ask: Literal["end"] = "end"


class ObjectCreated(_Model):
    say: Literal["created"] = "created"
    kind: str
    name: str


class JobProgress(_Model):
    say: Literal["progress"] = "progress"
    progress: Progress


class JobUp(_Model):
    say: Literal["up"] = "up"
    job: RunningJob


class JobsListed(_Model):
    """``more``: another part of the list follows."""

    say: Literal["jobs"] = "jobs"
    jobs: tuple[ListedJob, ...]
    more: bool = False


class JobEnded(_Model):
    say: Literal["ended"] = "ended"


class RequestRejected(_Model):
    """``missing``: the job does not exist."""

    say: Literal["refused"] = "refused"
    reason: str
    missing: bool = False


def rejection(error: ValidationError | KubernetesError) -> RequestRejected:
    """The reply to an invalid or failed request."""
    if isinstance(error, ValidationError):
        return RequestRejected(reason=first_problem(error))
    return RequestRejected(reason=str(error), missing=isinstance(error, NotFound))


ProvisioningRequest: TypeAlias = StartJob | FindJob | ListJobs | ScaleJob | EndJob
ProvisioningReply: TypeAlias = ObjectCreated | JobProgress | JobUp | JobsListed | JobEnded | RequestRejected
_requests: TypeAdapter[ProvisioningRequest] = TypeAdapter(Annotated[ProvisioningRequest, Field(discriminator="ask")])
_replies: TypeAdapter[ProvisioningReply] = TypeAdapter(Annotated[ProvisioningReply, Field(discriminator="say")])


def encode_reply(reply: ProvisioningReply) -> str:
    return reply.model_dump_json(by_alias=True)


def parse_request(text: str | bytes) -> ProvisioningRequest:
    """Raises ``pydantic.ValidationError`` for an invalid message."""
    return _requests.validate_json(text)


def parse_reply(text: str | bytes) -> ProvisioningReply:
    """Raises ``pydantic.ValidationError`` for an invalid message."""
    return _replies.validate_json(text)
