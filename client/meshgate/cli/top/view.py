"""How ``meshgate top`` shows a look: two tables, of calls and of ranks, that fit a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshgate.cli.console import age_text, new_table
from meshgate.cli.models import CallRate, GpuUsage, RankUsage, Top

Order: TypeAlias = Literal["rank", "cpu", "memory", "gpu"]
_KEYS: dict[Order, Callable[[RankUsage], float]] = {
    "rank": lambda rank: 0.0,
    "cpu": lambda rank: -(rank.cpu or 0.0),
    "memory": lambda rank: -rank.memory,
    "gpu": lambda rank: -(rank.gpu or 0.0),
}
NARROW = 80  # columns; below, a table leaves out what matters least
HEADS = 3  # lines of a table besides its rows: the heading, what is left out, and an empty line
CALL_SHARE = 3  # calls get at most this part of the lines, unless the ranks need less


def render(top: Top, title: str, *, width: int, height: int | None = None, order: Order = "rank") -> RenderableType:
    """``height``: leaves out the rows that do not fit into this number of lines; None: shows all."""
    ranks = sorted(top.ranks, key=_KEYS[order])
    problems = [Text(f"{name}: {problem.splitlines()[0]}") for name, problem in top.problems.items()]
    calls_shown, ranks_shown = len(top.calls), len(ranks)
    if height is not None:
        free = max(2, height - 2 * HEADS - 1 - len(problems))
        calls_shown = min(len(top.calls), max(free // CALL_SHARE, free - len(ranks)))
        ranks_shown = min(len(ranks), free - calls_shown)
    parts: list[RenderableType] = [Text(title, no_wrap=True, overflow="ellipsis")]
    if top.calls:
        parts += [_calls(top.calls[:calls_shown], wide=width >= NARROW), _rest(len(top.calls) - calls_shown, "meshes")]
    if ranks:
        shown = ranks[:ranks_shown]
        parts += [_ranks(shown, top.gpus, wide=width >= NARROW), _rest(len(ranks) - ranks_shown, "ranks")]
    if not top.calls and not ranks:
        parts.append(Text("no session has processes"))
    return Group(*parts, *problems)


def _rest(count: int, what: str) -> Text:
    return Text(f"… and {count:,} more {what}" if count > 0 else "")


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    table = new_table()
    for name in left:
        table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=4)
    for name in right:
        table.add_column(name, no_wrap=True, justify="right")
    return table


def _calls(calls: Sequence[CallRate], *, wide: bool) -> Table:
    table = _table(
        ["ACTORS", "SESSION"] if wide else ["ACTORS"], ["CALLS/S", "LATENCY", "FAILED", "IN FLIGHT", "OLDEST"]
    )
    for call in calls:
        table.add_row(
            *((call.mesh, call.session[:8]) if wide else (call.mesh,)),
            f"{call.rate:,.1f}" if call.rate < 100 else f"{call.rate:,.0f}",
            _duration(call.latency),
            Text(str(call.failed), style="red" if call.failed else ""),
            str(call.in_flight),
            age_text(call.oldest) if call.oldest is not None else "-",
        )
    return table


def _ranks(ranks: Sequence[RankUsage], gpus: Sequence[GpuUsage], *, wide: bool) -> Table:
    """GPU columns only if a host has GPUs."""
    left, right = ["PROCS", "HOST"], ["RANK", "CPU", "MEMORY"]
    if wide:
        right.insert(1, "PID")
    if gpus:
        right += ["GPUS", "GPU", "GPU MEMORY"] if wide else ["GPU", "GPU MEM"]
    table = _table(left, right)
    for rank in ranks:
        row = [rank.mesh, rank.host, str(rank.rank), *([str(rank.pid)] if wide else [])]
        row += [_percent(rank.cpu), _size(rank.memory)]
        if gpus:
            row += [",".join(map(str, rank.gpus)) or "-"] if wide else []
            row += [_percent(rank.gpu), _size(rank.gpu_memory)]
        table.add_row(*row)
    return table


def _percent(value: float | None) -> str:
    return f"{value:.0f}%" if value is not None else "-"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f}ms" if seconds < 1 else f"{seconds:.1f}s"


def _size(size: int | None) -> str:
    if size is None:
        return "-"
    for unit, length in (("Gi", 2**30), ("Mi", 2**20)):
        if size >= length:
            return f"{size / length:.1f}{unit}" if unit == "Gi" else f"{size / length:.0f}{unit}"
    return f"{size / 1024:.0f}Ki"
