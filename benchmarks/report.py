"""The table: on the terminal, as Markdown for docs/benchmarks.md, and as JSON with everything behind it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.results import Case, percentile

__all__ = ["BEGIN", "END", "as_markdown", "disturbance", "machine", "show", "write_into"]

COLUMNS = {"direct": "direct Monarch", "meshgate": "meshgate", "ray": "Ray Client", "other": "beside"}
BEGIN, END = "<!-- the table -->", "<!-- end of the table -->"


def show(console: Console, cases: Sequence[Case]) -> None:
    table = Table(title="direct Monarch, meshgate and Ray Client, in one run", pad_edge=False)
    table.add_column("what")
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("targets")
    for case in cases:
        checks = "\n".join(f"[{'green' if check.met else 'red'}]{check}[/]" for check in case.checks)
        note = f"[dim]{case.note}[/]" if case.note else ""
        table.add_row(case.name, *(_cell(case, peer) for peer in COLUMNS), "\n".join(filter(None, [checks, note])))
    console.print(table)


def _cell(case: Case, peer: str) -> str:
    if peer not in case.columns:
        return ""
    beside = f" ({case.beside})" if peer == "other" else ""
    return f"{case.columns[peer]}{beside}"


def as_markdown(cases: Sequence[Case], about: Sequence[tuple[str, str]]) -> str:
    lines = [f"| what | {' | '.join(COLUMNS.values())} | targets |", "|---|" + "---:|" * len(COLUMNS) + "---|"]
    for case in cases:
        cells = [_cell(case, peer) for peer in COLUMNS]
        said = "<br>".join([*map(str, case.checks), *([case.note] if case.note else [])])
        lines.append(f"| {case.name.strip()} | {' | '.join(cells)} | {said} |")
    return "\n".join([*lines, "", *(f"- {name}: {value}" for name, value in about)])


def write_into(document: Path, markdown: str) -> None:
    """Puts the table in place of the one between the two marks."""
    text = document.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    document.write_text(f"{before}{BEGIN}\n\n{markdown}\n\n{END}{after}")


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
