"""What a client and a gateway that provisions for it say to each other: JSON, one model a text message.

The client asks once; the gateway tells how it goes, and ends with Up, Ended or Refused.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from meshgate_kubernetes.errors import KubernetesError, NotFound
from meshgate_kubernetes.jobs import RunningJob
from meshgate_kubernetes.readiness import Progress
from meshgate_kubernetes.spec import JobName, JobSpec, Namespace

__all__ = [
    "Answer",
    "Ask",
    "Created",
    "End",
    "Ended",
    "Find",
    "Refused",
    "Start",
    "Told",
    "Up",
    "read_answer",
    "read_ask",
    "refused",
]

MAX_MESSAGE = 1 << 20


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Start(_Model):
    """Make this job, or take the same if it is there."""

    ask: Literal["start"] = "start"
    job: JobSpec
    timeout: float | None = Field(default=None, ge=0)


class Find(_Model):
    """Is there this job?"""

    ask: Literal["find"] = "find"
    name: JobName
    namespace: Namespace


class End(_Model):
    """End this job; answered when it is gone."""

    ask: Literal["end"] = "end"
    name: JobName
    namespace: Namespace


class Created(_Model):
    say: Literal["created"] = "created"
    kind: str
    name: str


class Told(_Model):
    say: Literal["progress"] = "progress"
    progress: Progress


class Up(_Model):
    say: Literal["up"] = "up"
    job: RunningJob


class Ended(_Model):
    say: Literal["ended"] = "ended"


class Refused(_Model):
    """``missing``: there is no such job."""

    say: Literal["refused"] = "refused"
    reason: str
    missing: bool = False


def refused(error: ValidationError | KubernetesError) -> Refused:
    """The answer to what could not be read, or done."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return Refused(reason=f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    return Refused(reason=str(error), missing=isinstance(error, NotFound))


Ask: TypeAlias = Start | Find | End
Answer: TypeAlias = Created | Told | Up | Ended | Refused
_ask: TypeAdapter[Ask] = TypeAdapter(Annotated[Ask, Field(discriminator="ask")])
_answer: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="say")])


def read_ask(text: str | bytes) -> Ask:
    """Raises ``pydantic.ValidationError`` on anything that is not one."""
    return _ask.validate_json(text)


def read_answer(text: str | bytes) -> Answer:
    """Raises ``pydantic.ValidationError`` on anything that is not one."""
    return _answer.validate_json(text)
