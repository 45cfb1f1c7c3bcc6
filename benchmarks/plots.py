"""The plots of docs/benchmarks.md, as SVG, from the numbers of the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import Case

_OURS, _OTHERS = "#2563eb", "#9ca3af"
_MUTED = "#6b7280"
_SIZES = {"h8": "8 hosts", "h16": "16 hosts", "h32": "32 hosts", "simulated": "1,024 simulated"}


def draw(cases: Sequence[Case], directory: Path) -> list[Path]:
    """Draws each plot that has cases, and returns the files."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update(
        {
            "svg.hashsalt": "meshgate",  # equal numbers produce equal files
            "svg.fonttype": "none",
            "font.size": 9,
            "font.family": "sans-serif",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 9,
            "figure.facecolor": "white",
        }
    )
    import matplotlib.pyplot as plt

    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, plot in _PLOTS.items():
        figure = plot(plt, cases)
        if figure is not None:
            path = directory / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
            path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
            plt.close(figure)
            drawn.append(path)
    return drawn


def _of(cases: Sequence[Case], table: str) -> list[Case]:
    return [case for case in cases if case.table == table]


def _log_scale(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
    axis.minorticks_off()


def _sync(plt: Any, cases: Sequence[Case]) -> Any:
    """Seconds by number of hosts, with a panel for each change."""
    panels: dict[str, dict[str, list[tuple[int, Case]]]] = {}
    for table in ("sync", "far sync"):
        for case in _of(cases, table):
            name, _, hosts = case.name.rpartition(", ")
            panels.setdefault(name, {}).setdefault(table, []).append((int(hosts.split()[0]), case))
    if not panels:
        return None
    figure, axes = plt.subplots(2, (len(panels) + 1) // 2, figsize=(9, 5), sharex=True, squeeze=False)
    for axis, (name, tables) in zip(axes.flat, panels.items(), strict=False):
        for table, rows in tables.items():
            style, suffix = ("-", "") if table == "sync" else ("--", ", 50 ms round trip")
            hosts = [count for count, _ in rows]
            for peer, colour in (("rsync", _OTHERS), ("meshgate", _OURS)):
                seconds = [case.columns[peer].number for _, case in rows]
                axis.plot(hosts, seconds, style, color=colour, marker="o", markersize=3, label=f"{peer}{suffix}")
        axis.set_title(name)
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 8, 32], ["1", "8", "32"])
        _log_scale(axis)
        axis.grid(visible=True, axis="y", color="#e5e7eb", linewidth=0.6)
    for axis in axes[-1]:
        axis.set_xlabel("hosts")
    for axis in axes[:, 0]:
        axis.set_ylabel("seconds")
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, bbox_to_anchor=(0.5, -0.04))
    figure.tight_layout()
    return figure


def _live(plt: Any, cases: Sequence[Case]) -> Any:
    """The share of saves that had run, by time."""
    rows = _of(cases, "live")
    if not rows:
        return None
    figure, axis = plt.subplots(figsize=(6, 2.8))
    for case, colour in zip(rows, (_OURS, "#0d9488", "#d97706"), strict=False):
        samples = sorted(case.columns["samples"].rounds)
        shares = [(position + 1) / len(samples) for position in range(len(samples))]
        axis.step(samples, shares, where="post", color=colour, label=case.name)
    axis.set_xlim(left=0)
    axis.set_ylim(0, 1)
    axis.set_xlabel("milliseconds from save to result")
    axis.set_ylabel("share of saves")
    axis.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.45, 1), ncols=3, fontsize=8)
    return figure


def _simulation(plt: Any, cases: Sequence[Case]) -> Any:
    rows = _of(cases, "simulation")
    if not rows:
        return None
    figure, axis = plt.subplots(figsize=(6, 0.4 * len(rows) + 0.8))
    axis.barh([case.name for case in rows], [case.columns["ratio"].number for case in rows], color=_OURS, height=0.6)
    axis.invert_yaxis()
    axis.axvline(1, color=_MUTED, linewidth=0.8)
    axis.axvline(2, color=_MUTED, linewidth=0.8, linestyle="--")
    axis.set_xlabel("time / bound (dashed: target)")
    return figure


def _fanout(plt: Any, cases: Sequence[Case]) -> Any:
    tables = [(table, _of(cases, table)) for table in ("fan-out", "stripes")]
    if not all(rows for _, rows in tables):
        return None
    figure, axes = plt.subplots(1, 2, figsize=(9, 3))
    for axis, (table, rows) in zip(axes, tables, strict=True):
        for peer, label in _SIZES.items():
            found = [(int(row.name.split()[1]), row.columns[peer].number) for row in rows if peer in row.columns]
            axis.plot(*zip(*found, strict=True), marker="o", markersize=3, label=label)
        axis.set_xscale("log", base=2)
        numbers = [int(row.name.split()[1]) for row in rows]
        axis.set_xticks(numbers, [str(number) for number in numbers])
        _log_scale(axis)
        axis.set_xlabel("children of a host" if table == "fan-out" else "stripes")
        axis.set_title("one line" if table == "fan-out" else "40 MB measured, 200 MB simulated")
    axes[0].set_ylabel("milliseconds")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, bbox_to_anchor=(0.5, -0.08))
    figure.tight_layout()
    return figure


_PLOTS: dict[str, Callable[[Any, Sequence[Case]], Any]] = {
    "sync": _sync,
    "save-to-call": _live,
    "simulation": _simulation,
    "fan-out": _fanout,
}
