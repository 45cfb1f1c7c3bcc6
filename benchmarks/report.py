"""The tables: on the terminal, and as Markdown for docs/benchmarks.md."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import rich.table
from rich.console import Console

from benchmarks.results import Case, percentile

__all__ = ["TABLES", "Table", "as_markdown", "disturbance", "machine", "show", "write_into"]


@dataclass(frozen=True, slots=True)
class Table:
    """``columns``: heading by peer. ``checked``: with targets and notes. ``plot``: what to show above it."""

    title: str
    columns: Mapping[str, str]
    checked: bool = True
    plot: str = ""


_BESIDE_RSYNC = {
    "meshgate": "meshgate",
    "rsync": "rsync",
    "times": "times as fast",
    "laptop": "left the laptop",
    "rsync_laptop": "with rsync",
    "gateway": "left the gateway",
    "cpu": "processors, meshgate",
    "rsync_cpu": "rsync",
}
_OF_ITS_SIZE = "left the gateway, of its size"
_HOSTS = {"h8": "8 hosts", "h16": "16 hosts", "h32": "32 hosts"}
TABLES = {
    "calls": Table(
        "direct Monarch, meshgate and Ray Client, in one run",
        {"direct": "direct Monarch", "meshgate": "meshgate", "ray": "Ray Client", "other": "beside"},
    ),
    "sync": Table("a change brought to every host, beside rsync", _BESIDE_RSYNC, plot="sync"),
    "far sync": Table("the same with a round trip of 50 ms between laptop and gateway", _BESIDE_RSYNC),
    "live": Table(
        "from save to the first call that runs the new line",
        {"median": "median", "p95": "95th percentile", "worst": "worst"},
        plot="save-to-call",
    ),
    "simulation": Table(
        "4,096 simulated hosts",
        {"seconds": "time", "bound": "bound", "ratio": "of the bound", "gateway": _OF_ITS_SIZE, "twice": "came twice"},
        plot="simulation",
    ),
    "fan-out": Table(
        "one line changed, by the control tree's fan-out",
        {**_HOSTS, "simulated": "1,024 simulated", "simulated_gateway": _OF_ITS_SIZE},
        checked=False,
        plot="fan-out",
    ),
    "stripes": Table(
        "a large version, by the number of stripes: 40 MB here, 200 MB simulated",
        {**_HOSTS, "simulated": "1,024 simulated", "failing": "1 % of them fail", "simulated_gateway": _OF_ITS_SIZE},
        checked=False,
    ),
}


def show(console: Console, cases: Sequence[Case]) -> None:
    for name, table in TABLES.items():
        rows = [case for case in cases if case.table == name]
        if rows:
            console.print(_rendered(table, rows))


def _rendered(table: Table, cases: Sequence[Case]) -> rich.table.Table:
    rendered = rich.table.Table(title=table.title, pad_edge=False)
    rendered.add_column("what")
    for heading in table.columns.values():
        rendered.add_column(heading, justify="right")
    if table.checked:
        rendered.add_column("targets")
    for case in cases:
        cells = [case.name, *(_cell(case, peer) for peer in table.columns)]
        if table.checked:
            checks = [f"[{'green' if check.met else 'red'}]{check}[/]" for check in case.checks]
            cells.append("\n".join([*checks, *([f"[dim]{case.note}[/]"] if case.note else [])]))
        rendered.add_row(*cells)
    return rendered


def _cell(case: Case, peer: str) -> str:
    if peer not in case.columns:
        return ""
    beside = f" ({case.beside})" if peer == "other" else ""
    return f"{case.columns[peer]}{beside}"


def as_markdown(table: Table, cases: Sequence[Case], about: Sequence[tuple[str, str]]) -> str:
    headings = ["what", *table.columns.values(), *(["targets"] if table.checked else [])]
    lines = [f"| {' | '.join(headings)} |", "|---|" + "---:|" * len(table.columns) + "---|" * table.checked]
    for case in cases:
        cells = [case.name.strip(), *(_cell(case, peer) for peer in table.columns)]
        if table.checked:
            cells.append("<br>".join([*map(str, case.checks), *([case.note] if case.note else [])]))
        lines.append(f"| {' | '.join(cells)} |")
    plot = [f"![{table.title}](plots/{table.plot}.svg)", ""] if table.plot else []
    return "\n".join([*plot, *lines, "", *(f"- {name}: {value}" for name, value in about)])


def write_into(document: Path, cases: Sequence[Case], about: Sequence[tuple[str, str]]) -> None:
    """Puts each table that there are cases of in place of the one between its two marks. Raises ValueError where the
    document has no such marks."""
    text = document.read_text()
    for name, table in TABLES.items():
        rows = [case for case in cases if case.table == name]
        if not rows:
            continue
        begin, end = f"<!-- table: {name} -->", f"<!-- end of table: {name} -->"
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            raise ValueError(f"{document} has no place for the table {name!r}: {begin} and {end}")
        text = f"{before}{begin}\n\n{as_markdown(table, rows, about)}\n\n{end}{after}"
    document.write_text(text)


def machine(ray_version: str | None, loads: Sequence[str]) -> list[tuple[str, str]]:
    """What the numbers depend on."""
    packages = ("meshgate", "torchmonarch", "websockets", "uvloop", "pydantic", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return [
        ("machine", f"{_cpu()}, {len(os.sched_getaffinity(0))} cores, {_memory()}, Linux {platform.release()}"),
        ("versions", f"Python {platform.python_version()}, {versions}, ray {ray_version or 'not installed'}"),
        ("commit", _commit()),
        ("load, one minute's average, at the start of each group", ", ".join(loads)),
    ]


def disturbance(others: Sequence[float]) -> str:
    if not others:
        return "not measured"
    return f"{percentile(others, 0.5):.2f} in the median round, {percentile(others, 0.9):.2f} in one of ten"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory() -> str:
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"


def _commit() -> str:
    said = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return said.stdout.strip() or "unknown"
