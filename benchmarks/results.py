"""Measured values, ratios between peers, and targets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Unit = Literal["ms", "s", "/s", "MB/s", "MB", "bytes", "time", "times", "%", "", "round trips"]


@dataclass(frozen=True, slots=True)
class Value:
    """A measured number: the median of ``rounds``, which has one number for each round."""

    unit: Unit
    rounds: tuple[float, ...]

    @property
    def number(self) -> float:
        return statistics.median(self.rounds) if self.rounds else math.nan

    def __str__(self) -> str:
        return shown(self.number, self.unit)


@dataclass(frozen=True, slots=True)
class Check:
    """A number and its target."""

    what: str
    number: float
    target: str
    met: bool

    def __str__(self) -> str:
        return f"{'✓' if self.met else '✗'} {self.what}, target {self.target}"


@dataclass(slots=True)
class Case:
    """A row of the table ``table`` (see ``report.TABLES``).

    ``columns`` has the values by peer. In the table of calls these are direct, meshgate, ray and other; ``beside``
    names the other. A column that the table lacks is written to the JSON only.
    """

    name: str
    columns: dict[str, Value] = field(default_factory=dict)
    beside: str = ""
    checks: list[Check] = field(default_factory=list)
    note: str = ""
    table: str = "calls"

    def as_json(self) -> dict[str, Any]:
        return {
            "table": self.table,
            "name": self.name,
            "columns": {
                peer: {"median": value.number, "unit": value.unit, "rounds": list(value.rounds)}
                for peer, value in self.columns.items()
            },
            "beside": self.beside,
            "checks": [
                {"what": check.what, "number": check.number, "target": check.target, "met": check.met}
                for check in self.checks
            ],
            "note": self.note,
        }

    def rename(self, **columns: str) -> None:
        """Moves values to another column: ``attach="other"``."""
        for peer, column in columns.items():
            if peer in self.columns:
                self.columns[column] = self.columns.pop(peer)

    def ratio(self, over: str, under: str) -> float | None:
        """One peer's number divided by another's; None if one is missing."""
        if over in self.columns and under in self.columns and self.columns[under].number:
            return self.columns[over].number / self.columns[under].number
        return None


def at_most(what: str, number: float | None, maximum: float, *, unit: str = " times") -> list[Check]:
    """Empty if there is no number to check."""
    return _check(what, number, maximum, "≤", unit, lambda value: value <= maximum)


def at_least(what: str, number: float | None, minimum: float, *, unit: str = " times") -> list[Check]:
    return _check(what, number, minimum, "≥", unit, lambda value: value >= minimum)


def _check(
    what: str, number: float | None, bound: float, sign: str, unit: str, met: Callable[[float], bool]
) -> list[Check]:
    if number is None or math.isnan(number):
        return []
    return [Check(f"{what} {number:.2f}{unit}", number, f"{sign} {bound:g}{unit}", met(number))]


def median(numbers: Iterable[float]) -> float:
    return statistics.median(list(numbers))


def percentile(numbers: Sequence[float], share: float) -> float:
    """The smallest number that is at least as large as ``share`` of all."""
    ordered = sorted(numbers)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def shown(number: float, unit: str) -> str:
    if unit == "/s":
        return f"{number:,.0f}/s"
    if unit in ("MB/s", "MB"):
        return f"{number:,.0f} {unit}"
    if unit == "bytes":
        return _size(number)
    if unit == "time":  # in seconds, of any size
        number, unit = (number, "s") if number >= 1 else (number * 1e3, "ms")
    digits = 0 if number >= 100 else 1 if number >= 20 else 2
    if unit in ("times", "%"):
        return f"{number:,.{digits}f}{' %' if unit == '%' else ''}"
    return f"{number:.{digits}f} {unit}".strip()


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.{1 if number >= 10 else 2}f} {unit}"
