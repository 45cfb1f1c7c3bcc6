"""Types of the fields of messages, with their limits, and the models that several messages contain.

The models shorten texts and names of user code and Monarch that a sender puts into them, so that an answer is never
lost because it is too long. They do not shorten what they parse: a receiver rejects it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import Annotated, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

MAX_SENT = 65_536  # characters; JSON takes up to six bytes for one, and a header of 1 MiB holds two such texts
MAX_SENT_NAMES = 131_072  # bytes of JSON
NOTICE = 40  # characters; at least the length of the notice in place of what was cut
V = TypeVar("V")


def shorten(text: str, limit: int) -> str:
    """``text`` in at most ``limit`` characters: a longer one loses its middle. Characters that UTF-8 cannot encode
    become question marks."""
    if len(text) > limit:
        kept = max(limit - NOTICE, 0)
        head, tail = text[: kept // 2], text[len(text) - (kept - kept // 2) :]
        text = f"{head}\n[{len(text) - kept} characters cut]\n{tail}"
    return text if text.isascii() else text.encode(errors="replace").decode()


def shorten_sent_text(text: V, info: ValidationInfo) -> V | str:
    """A pydantic validator that runs before the check of the length."""
    return shorten(text, MAX_SENT) if isinstance(text, str) and info.mode == "python" else text


def shorten_sent_names(names: V, info: ValidationInfo) -> V | dict[object, object]:
    """A pydantic validator for names by rank: keeps the first ones that fit."""
    if not isinstance(names, dict) or info.mode != "python":
        return names
    size = 0
    for count, name in enumerate(names.values()):
        size += len(json.dumps(name)) + 24  # the rank and the punctuation
        if size > MAX_SENT_NAMES:
            return dict(list(names.items())[:count])
    return names


def require_ascending(spans: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """A pydantic validator: with it, spans contain no more ranks than a mesh has."""
    ends = [end for span in spans for end in span]
    if ends != sorted(ends):
        raise ValueError("the ranks are not in ascending order")
    return spans


MAX_LABEL = 256  # characters
Label: TypeAlias = Annotated[str, Field(max_length=MAX_LABEL)]
Path: TypeAlias = Annotated[str, Field(max_length=4096)]
Line: TypeAlias = Annotated[str, Field(max_length=262_144)]
Text: TypeAlias = Annotated[Line, BeforeValidator(shorten_sent_text)]
MAX_COUNT = 2**53
Count: TypeAlias = Annotated[int, Field(ge=0, le=MAX_COUNT)]
ObjectId: TypeAlias = Annotated[int, Field(ge=-(2**53), le=2**53)]  # 0 is not an object
MAX_DIMENSIONS = 64

# A peer can make these as long as a header: validation stops at the first invalid element.
Ranks: TypeAlias = Annotated[tuple[Count, ...], Field(fail_fast=True)]
Paths: TypeAlias = Annotated[tuple[Path, ...], Field(fail_fast=True)]
ObjectIds: TypeAlias = Annotated[tuple[ObjectId, ...], Field(fail_fast=True)]
MAX_RANKS = 2**18  # of a mesh
MAX_SPANS = 64
_Rank: TypeAlias = Annotated[int, Field(ge=0, le=MAX_RANKS - 1)]
# Ranks that follow one another, as the first and the last of them.
Spans: TypeAlias = Annotated[
    tuple[tuple[_Rank, _Rank], ...], Field(max_length=MAX_SPANS), AfterValidator(require_ascending)
]
HostNames: TypeAlias = Annotated[dict[Count, Label], BeforeValidator(shorten_sent_names)]  # by rank


def spans_of(ranks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The first and the last of each sequence in ``ranks``, which ascend."""
    for _, run in groupby(enumerate(ranks), lambda each: each[1] - each[0]):
        sequence = [rank for _, rank in run]
        yield sequence[0], sequence[-1]


def exception_line(report: str) -> str:
    """The first line of the exception that ``report`` has an outermost traceback of, the last one; empty if it has
    none. Of an exception group, that is its own."""
    lines = report.rstrip().split("\n")
    frames = [(-_indent(line), at) for at, line in enumerate(lines) if line.lstrip(" |").startswith('File "')]
    if not frames:
        return ""
    outermost, last = max(frames)
    after = (line for line in lines[last + 1 :] if line.strip(" |") and _indent(line) < -outermost)
    return next(after, "").strip(" |")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" |"))  # the lines of a group begin with bars


def first_problem(error: ValidationError) -> str:
    """The first invalid field, and what is wrong with it. It has no value of a field: those may be secret."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Region(Model):
    """A hyper-rectangle of ranks: an offset, and a label, a size and a stride for each dimension."""

    labels: tuple[Label, ...] = Field(max_length=MAX_DIMENSIONS)
    offset: Count
    sizes: tuple[Count, ...] = Field(max_length=MAX_DIMENSIONS)
    strides: tuple[Count, ...] = Field(max_length=MAX_DIMENSIONS)

    @model_validator(mode="after")
    def _check_lengths(self) -> Region:
        if not len(self.labels) == len(self.sizes) == len(self.strides):
            raise ValueError("a region must have as many sizes and strides as labels")
        return self

    def __eq__(self, other: object) -> bool:  # five times faster than pydantic's; every call compares regions
        return type(other) is Region and _key(self) == _key(other)

    def __hash__(self) -> int:
        return hash(_key(self))


_key = attrgetter("labels", "offset", "sizes", "strides")


class MeshRef(Model):
    """A mesh, or the part of it in ``region``. ``python``, of hosts: the interpreter that starts processes on them."""

    object: ObjectId
    region: Region | None = None
    python: Path | None = None


class Host(Model):
    name: Label  # of the pod or the local process, such as "workers-0"
    address: Path = ""
    identity: Label = ""  # of its Monarch service, or the UUID that it derives from; "" if unknown
    node: Label = ""  # of a pod, if known; so is the zone
    zone: Label = ""
    python: Label = ""  # the versions that its worker reported; "" if unknown
    monarch: Label = ""
