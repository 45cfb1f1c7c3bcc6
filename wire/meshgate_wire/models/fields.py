"""Types of the fields of messages, with their limits, and the models that several messages contain."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..text import shorten_sent_names, shorten_sent_text

Label: TypeAlias = Annotated[str, Field(max_length=256)]
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
HostNames: TypeAlias = Annotated[dict[Count, Label], BeforeValidator(shorten_sent_names)]  # by rank


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
