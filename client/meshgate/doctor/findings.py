"""What a check found."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Finding(BaseModel):
    """The outcome of one check."""

    model_config = ConfigDict(frozen=True)

    check: str
    outcome: Literal["ok", "problem"]
    text: str
    remedy: str = Field(default="", description="what to change")


def problem(check: str, text: object, remedy: str) -> Finding:
    return Finding(check=check, outcome="problem", text=str(text), remedy=remedy)
