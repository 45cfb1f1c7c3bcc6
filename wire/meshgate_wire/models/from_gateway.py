"""The messages that a gateway sends about objects, calls and output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Annotated, Literal

from pydantic import Field

from .fields import (
    Count,
    Host,
    HostNames,
    Label,
    Line,
    Model,
    ObjectId,
    ObjectIds,
    Ranks,
    Spans,
    Text,
)


class HostsAttached(Model):
    type: Literal["hosts_attached"] = "hosts_attached"
    object: ObjectId
    hosts: Annotated[tuple[Host, ...], Field(fail_fast=True)]


class HostEnding(Model):
    """The cluster is going to end a host of mesh ``object``. HostsAttached follows once another has its place."""

    type: Literal["host_ending"] = "host_ending"
    object: ObjectId
    host: Label
    reason: Text
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # that are left


class Adopted(Model):
    """The meshes in a pickled value, in the order in which they are unpickled."""

    objects: ObjectIds = ()


class Values(Model):
    """The values of a call, one buffer for each rank, in rank order. ``objects[i]`` belongs to buffer i."""

    type: Literal["values"] = "values"
    call: Count
    ranks: Ranks | None = None  # for choose: the rank that replied
    objects: dict[Count, Adopted] = Field(default={})


class Item(Model):
    """One reply of a stream. Buffers: the pickled value."""

    type: Literal["item"] = "item"
    call: Count
    rank: Count
    objects: Adopted = Adopted()


class Done(Model):
    type: Literal["done"] = "done"
    call: Count


class ErrorGroup(Model):
    """The ranks whose pickled exceptions were identical.

    ``buffer``: the index of the pickled exception. None, in the last group only, for all ranks whose exceptions were
    not sent, since there were too many distinct ones.
    """

    ranks: Ranks  # the first ones, at most 64
    count: Count  # of all ranks in the group
    buffer: Count | None = None


class Failure(Model):
    """Why a call or a creation failed.

    ``actor``: endpoints raised exceptions, grouped in ``errors``, or the bootstrap of a process did, and ``message`` is
    its traceback. ``supervision``: an actor, process or host died; ``ranks`` are those that died. ``step``: an earlier
    step failed that this one depends on; ``step`` names it and ``message`` is its error. ``lost``: the processes of
    ``ranks`` have ended, which kept values of the call ``step``. ``cancelled``: the program cancelled the call, which
    ``ranks`` had not answered. ``invalid``: the gateway rejected the request. ``stale_code``: a host could not get the
    code version. ``internal``: a bug in the gateway.

    With ``step``, another failure than these is that of an earlier call, whose result this one takes.
    """

    kind: Literal["actor", "supervision", "step", "lost", "cancelled", "invalid", "stale_code", "internal"]
    message: Text
    step: Text = ""
    mesh: Label = ""
    ranks: Ranks = ()
    hosts: HostNames = Field(default={})  # host name by rank in the target, for the ranks in this failure
    errors: Annotated[tuple[ErrorGroup, ...], Field(fail_fast=True)] = ()
    total: Count = 0  # called ranks
    unanswered: Count = 0  # ranks that had not replied when the failure was sent


class CallProgress(Model):
    """How far call ``call`` is: ``waiting`` are the hosts of the first ranks, in the target, that have not replied."""

    call: Count
    total: Count
    answered: Count
    age: float = Field(ge=0, allow_inf_nan=False)  # seconds since it was sent to the actors
    waiting: HostNames = Field(default={})
    first: bool = True  # no earlier call to these actors is in flight


RANKS_NAMED = 4


def waiting_ranks(hosts: Mapping[int, str], missing: int) -> str:
    """``rank 1 on workers-0 and 2 others``, for people: of ``missing`` ranks, the first, which have these ``hosts``."""
    named = [f"rank {rank}" + (f" on {host}" if host else "") for rank, host in islice(hosts.items(), RANKS_NAMED)]
    return ", ".join(named) + (f" and {missing - len(named)} others" if missing > len(named) else "")


class Progress(Model):
    """The progress of calls that take long, sent when it has changed."""

    type: Literal["progress"] = "progress"
    calls: Annotated[tuple[CallProgress, ...], Field(fail_fast=True)]


class Failed(Model):
    """A call failed. Buffers: the distinct pickled exceptions."""

    type: Literal["failed"] = "failed"
    call: Count
    rank: Count | None = None  # for an item of a stream
    failure: Failure


class ObjectFailed(Model):
    """The creation of an object failed; whatever depends on it fails too."""

    type: Literal["object_failed"] = "object_failed"
    object: ObjectId
    failure: Failure


class Fault(Model):
    """A supervision event of a mesh of this session, for ``unhandled_fault_hook``."""

    type: Literal["fault"] = "fault"
    object: ObjectId | None
    mesh: Label
    ranks: Ranks
    hosts: HostNames = Field(default={})
    report: Text
    number: Count = 0  # in a detached session, from 1


class OutputLine(Model):
    """One line that an actor printed; ``end`` is its line end."""

    stream: Literal["stdout", "stderr"]
    mesh: Label = ""
    procs: ObjectId = 0  # the mesh of the process, if it is one of the session
    ranks: Ranks = ()  # the first ones that printed it, at most 64
    more_ranks: Spans = ()  # the others; an older gateway does not name them
    count: Count = 1
    host: Label = ""
    text: Line
    end: Literal["\n", "\r", ""] = "\n"

    def every_rank(self) -> Iterator[int]:
        """The ranks that printed it, as far as they are named."""
        return chain(self.ranks, *(range(first, last + 1) for first, last in self.more_ranks))


class Output(Model):
    """Lines that actors printed. In a detached session ``first`` is the number of the first of them, from 1."""

    type: Literal["output"] = "output"
    first: Count = 0
    lines: Annotated[tuple[OutputLine, ...], Field(fail_fast=True)]


class PortMessage(Model):
    """A message to a channel. Buffers: the pickled value, or with ``exception`` the pickled exception."""

    type: Literal["port_message"] = "port_message"
    port: ObjectId
    rank: Count | None = None
    exception: bool = False
    objects: Adopted = Adopted()
    number: Count = 0  # of the message in its channel, in a detached session, from 1
