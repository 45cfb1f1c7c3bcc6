"""Kubernetes quantities (``500m``, ``1.5Gi``): parsed exactly, formatted for people."""

from __future__ import annotations

import re
from decimal import Decimal

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|([numkMGTPE]|[KMGTPE]i)?)")
_SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "E": Decimal(10) ** 18,
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)},
}


def parse_quantity(text: str | int | float) -> Decimal:
    """The value of ``text``. Raises ValueError if it is not a valid quantity."""
    match = _QUANTITY.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a Kubernetes quantity such as 2, 500m, 1.5 or 64Gi")
    number, exponent, suffix = match.groups()
    if exponent:
        return Decimal(number + exponent)
    return Decimal(number) * _SUFFIXES.get(suffix or "", Decimal(1))


def format_quantity(value: Decimal, resource: str = "") -> str:
    """``value`` for people: memory and storage with the largest fitting binary suffix, other resources plain."""
    if resource == "memory" or resource.endswith("storage"):
        for suffix in ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki"):
            if abs(value) >= _SUFFIXES[suffix]:
                return f"{_trim(value / _SUFFIXES[suffix])}{suffix}"
        return str(int(value))
    if resource == "cpu" and value != value.to_integral_value():
        return f"{int(value * 1000)}m"
    return _trim(value)


def _trim(value: Decimal) -> str:
    text = f"{value:.1f}"
    return text.removesuffix(".0")
