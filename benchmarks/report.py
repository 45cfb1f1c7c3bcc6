"""The tables, for the terminal and as Markdown for docs/benchmarks.md."""

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
from benchmarks.sections import section, write_section

# CPU cores that other programs may use, as the median of a run's rounds, if its figures are published.
MAX_DISTURBANCE = 0.05


@dataclass(frozen=True, slots=True)
class Table:
    """``columns``: the heading for each peer. ``checked``: has targets and notes. ``plot``: the plot above it."""

    title: str
    columns: Mapping[str, str]
    checked: bool = True
    plot: str = ""


_BESIDE_RSYNC = {
    "meshgate": "meshgate",
    "rsync": "rsync",
    "times": "times as fast",
    "laptop": "sent by the laptop",
    "rsync_laptop": "sent by rsync",
    "gateway": "sent by the gateway",
    "cpu": "CPU time, meshgate",
    "rsync_cpu": "CPU time, rsync",
}
_RELATIVE_TRAFFIC = "sent by the gateway / size"
_HOSTS = {"h8": "8 hosts", "h16": "16 hosts", "h32": "32 hosts"}
TABLES = {
    "calls": Table(
        "direct Monarch, meshgate and Ray Client in one run",
        {"direct": "direct Monarch", "meshgate": "meshgate", "ray": "Ray Client", "other": "reference"},
    ),
    "scale": Table(
        "imports, many ranks, many sessions and large values",
        {"direct": "direct Monarch", "meshgate": "meshgate", "other": "reference"},
    ),
    "sync": Table("time to bring a change to every host, compared with rsync", _BESIDE_RSYNC, plot="sync"),
    "far sync": Table("the same with a round trip of 50 ms between laptop and gateway", _BESIDE_RSYNC),
    "processes": Table(
        "one line in 10,000 files, on 8 hosts that ran processes of the last version, compared with rsync",
        {
            "meshgate": "meshgate",
            "least": "minimum",
            "most": "maximum",
            "usable": "until processes can start",
            "rsync": "rsync",
            "times": "times as fast",
            "cpu": "CPU time, meshgate",
            "rsync_cpu": "CPU time, rsync",
        },
    ),
    "mechanisms": Table(
        "what mechanisms of the store and of reload save: the first named is in use, the second was left out",
        {"with": "in use", "without": "instead"},
        checked=False,
    ),
    "live": Table(
        "from save to the first call that runs the new line",
        {"median": "median", "p95": "95th percentile", "worst": "maximum"},
        plot="save-to-call",
    ),
    "edits": Table(
        "from an edit to the result of the edited code",
        {"seconds": "time", "driver": "times the driver's", "tool": "times the tool's"},
        checked=False,
    ),
    "simulation": Table(
        "4,096 simulated hosts",
        {
            "seconds": "time",
            "bound": "bound",
            "ratio": "time / bound",
            "gateway": _RELATIVE_TRAFFIC,
            "twice": "received twice",
        },
        plot="simulation",
    ),
    "fan-out": Table(
        "one line changed, by fan-out of the control tree",
        {**_HOSTS, "simulated": "1,024 simulated", "simulated_gateway": _RELATIVE_TRAFFIC},
        checked=False,
        plot="fan-out",
    ),
    "stripes": Table(
        "a large version, by number of stripes: 40 MB measured, 200 MB simulated",
        {**_HOSTS, "simulated": "1,024 simulated", "failing": "1 % failing", "simulated_gateway": _RELATIVE_TRAFFIC},
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
    rendered.add_column("measurement")
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
    headings = ["measurement", *table.columns.values(), *(["targets"] if table.checked else [])]
    lines = [f"| {' | '.join(headings)} |", "|---|" + "---:|" * len(table.columns) + "---|" * table.checked]
    for case in cases:
        cells = [case.name.strip(), *(_cell(case, peer) for peer in table.columns)]
        if table.checked:
            cells.append("<br>".join([*map(str, case.checks), *([case.note] if case.note else [])]))
        lines.append(f"| {' | '.join(cells)} |")
    plot = [f"![{table.title}](plots/{table.plot}.svg)", ""] if table.plot else []
    return "\n".join([*plot, *lines, "", *(f"- {name}: {value}" for name, value in about)])


def write_into(
    document: Path, cases: Sequence[Case], about: Sequence[tuple[str, str]], others: Sequence[float]
) -> None:
    """Replaces each table that has cases. ``others``: CPU cores that other processes used, by round.

    Raises ValueError, and writes nothing, if other programs disturbed the run, if a table would lose rows that this run
    did not measure, or if the document lacks the markers of a table.
    """
    if not others or percentile(others, 0.5) > MAX_DISTURBANCE:
        raise ValueError(
            f"{document} was not changed: while this ran, other programs used CPU cores ({disturbance(others)}); a "
            f"published figure comes from a machine on which nothing else runs (median of at most {MAX_DISTURBANCE}). "
            "End the other programs and repeat the command."
        )
    tables = {name: [case for case in cases if case.table == name] for name in TABLES}
    for name, rows in tables.items():
        lost = _row_names(section(document, f"table: {name}")) - {case.name.strip() for case in rows}
        if rows and lost:
            raise ValueError(
                f"{document} was not changed: this run did not measure {', '.join(sorted(lost))}, which the table "
                f"{name!r} has. Run all groups of a table together, or remove these rows from the page first."
            )
    for name, rows in tables.items():
        if rows:
            write_section(document, f"table: {name}", f"\n{as_markdown(TABLES[name], rows, about)}\n")


def _row_names(table: str) -> set[str]:
    """The first cells of a Markdown table, without its heading."""
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    return {row.split("|")[1].strip() for row in rows[1:]}


def machine(ray_version: str | None, loads: Sequence[str]) -> list[tuple[str, str]]:
    """Facts about the machine that the numbers depend on."""
    packages = ("meshgate", "torchmonarch", "websockets", "uvloop", "pydantic", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return [
        ("machine", f"{_cpu()}, {len(os.sched_getaffinity(0))} cores, {_memory()}, Linux {platform.release()}"),
        ("versions", f"Python {platform.python_version()}, {versions}, ray {ray_version or 'not installed'}"),
        ("commit", _commit()),
        ("1-minute load average at the start of each group", ", ".join(loads)),
    ]


def disturbance(others: Sequence[float]) -> str:
    if not others:
        return "not measured"
    return f"median {percentile(others, 0.5):.2f}, 90th percentile {percentile(others, 0.9):.2f}"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory() -> str:
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
