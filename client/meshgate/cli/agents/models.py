"""What ``meshgate call`` and ``meshgate run`` print with ``--json``."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class ErrorGroup(_Model):
    """Ranks that failed in the same way."""

    ranks: list[int] = Field(description="the first of them")
    count: int
    message: str
    traceback: str = Field(description="on the rank; its files are relative to the project")


class ErrorReport(_Model):
    """Why a program or a call failed."""

    type: str = Field(description="the class of the exception; of one that ranks raised, theirs")
    message: str
    traceback: str = Field(default="", description="of the program on this machine")
    endpoint: str = Field(default="", description="of the call that failed, as mesh.endpoint")
    groups: list[ErrorGroup] = Field(default=[], description="of a call that failed on ranks: the largest first")


class RankValue(_Model):
    """What a rank returned."""

    rank: int
    value: Any = Field(description="as JSON, or null if it cannot be expressed in JSON")
    text: str = Field(default="", description="its repr, if it cannot")


class Reload(_Model):
    """What the processes of the actors reloaded."""

    version: str
    files: int = Field(description="changed files that were sent")
    modules: list[str]
    old_classes: list[str] = Field(description="classes of live objects, which keep their old code until spawned again")


class Called(_Model):
    """``meshgate call``"""

    target: str
    session: str = Field(description="in which the actors are")
    values: list[RankValue] = []
    output: str = Field(default="", description="what actors printed meanwhile")
    error: ErrorReport | None = None
    reload: Reload | None = Field(default=None, description="null: the code was not synced")
    seconds: dict[str, float] = Field(description="time of each step")


class Ran(_Model):
    """``meshgate run``"""

    returncode: int = Field(description="negative: the signal that ended it")
    stdout: str
    stderr: str
    error: ErrorReport | None = Field(default=None, description="the exception that ended the program")
    seconds: float
