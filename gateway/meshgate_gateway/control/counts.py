"""What an engine counts for the gateway's metrics: a control message with the counts since the last one."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

# Upper bounds of histogram buckets, in seconds. A call takes a millisecond or a training step; a save, a tenth second.
CALL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
SYNC_BOUNDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
Outcome: TypeAlias = Literal["ok", "failed"]


class Samples(BaseModel):
    """Durations as counts per bucket; the last bucket has those above all bounds. ``seconds`` is their sum."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    buckets: tuple[int, ...] = ()
    seconds: float = 0.0


class EngineCounts(BaseModel):
    """``calls`` by outcome, with the durations of those that waited for replies; ``casts`` are calls without replies.
    ``syncs``: durations from a version's offer to the last host. Bytes are those of the client's connections."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Literal["counts"] = "counts"
    calls: dict[Outcome, int] = {}
    call_times: Samples = Samples()
    casts: int = 0
    sync_times: Samples = Samples()
    bytes_received: int = 0
    bytes_sent: int = 0
    lines: int = 0
