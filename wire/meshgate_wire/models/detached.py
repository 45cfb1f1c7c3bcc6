"""The messages of detached sessions, which keep running when their holder leaves.

``docs/sessions.md`` describes what a detached session keeps. A new holder first receives the messages that created the
session's objects, as their creator sent them, then what became of them, the calls that are kept, and ``Attached``.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from .fields import Count, Label, Line, MeshRef, Model, ObjectId, Paths

CallNumbers: TypeAlias = Annotated[tuple[Count, ...], Field(fail_fast=True)]


class Parameter(Model):
    """A parameter of an endpoint. ``kind`` is as in ``inspect.Parameter``; ``default`` and ``annotation`` are text."""

    name: Label
    kind: Annotated[int, Field(ge=0, le=4)]
    default: Label | None = None
    annotation: Label | None = None


class EndpointSignature(Model):
    """An endpoint as its callers see it."""

    name: Label
    parameters: Annotated[tuple[Parameter, ...], Field(fail_fast=True)]
    explicit_port: bool = False
    is_async: bool = False
    placeholders: Annotated[int, Field(ge=0, le=2)] = 1  # leading parameters that callers do not pass


# --- client to gateway ------------------------------------------------------------------------------------


class Detach(Model):
    """From now on the session keeps what its holder has not read, and another client may take it over. Reply: Keeps,
    then Done."""

    type: Literal["detach"] = "detach"
    call: Count
    name: Label


class Read(Model):
    """What the holder has read since its last ``Read``, so that the gateway need not keep it.

    ``released``: calls whose results the program dropped unread. ``ports``, ``output`` and ``faults`` are the numbers
    of the last message of each channel that was taken, the last line that was printed, and the last fault that was
    reported.
    """

    type: Literal["read"] = "read"
    calls: CallNumbers = ()
    released: CallNumbers = ()
    ports: dict[ObjectId, Count] = Field(default={})
    output: Count | None = None
    faults: Count | None = None


class Resume(Model):
    """A new holder is ready for output and channels. ``replay``: output from the first line that is kept."""

    type: Literal["resume"] = "resume"
    replay: bool = False


class Fetch(Model):
    """A new holder waits for the results of these calls of an earlier one."""

    type: Literal["fetch"] = "fetch"
    calls: CallNumbers


# --- gateway to client ------------------------------------------------------------------------------------


class Keeps(Model):
    """Calls that the holder made before it sent Detach and that are answered after it, so that their replies are kept.
    Of other calls the reply is on its way, and the holder sends it back."""

    type: Literal["keeps"] = "keeps"
    calls: CallNumbers


class KeptCall(Model):
    """A call of an earlier holder.

    ``state``: it is running, its result has not been read, its result was read and is still kept, or its result is no
    longer kept (``lost``), for the reason in ``reason``.
    """

    call: Count
    target: MeshRef
    endpoint: Label
    adverb: Literal["call", "call_one", "choose", "stream"]
    tag: Label = ""
    age: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # seconds since the gateway received it
    state: Literal["in flight", "finished", "read", "lost"]
    reason: Label = ""


class KeptCalls(Model):
    type: Literal["kept_calls"] = "kept_calls"
    calls: Annotated[tuple[KeptCall, ...], Field(fail_fast=True)]


class Attached(Model):
    """The last message of what a new holder receives first.

    ``next_object`` and ``next_call`` are numbers that no earlier holder has used. ``never_received``: calls that an
    earlier holder had posted and the gateway never received, as far as it can know.
    """

    type: Literal["attached"] = "attached"
    name: Label
    takeovers: Count
    next_object: Count
    next_call: Count
    never_received: Count = 0
    code_version: Label | None = None
    code_paths: Paths = ()
    previous_holder: Line = ""
    lines_dropped: Count = 0  # at the start of the output, which are no longer kept
    unread_lines: Count = 0
