"""The generated parts of docs/compatibility.md: the names that are not available, and the results by release."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshgate.actors.monarch_settings import REFUSED
from meshgate.actors.monarch_surface import AVAILABLE_JOB_NAMES, UNAVAILABLE, UNAVAILABLE_JOB_NAMES
from tests.conformance.signatures import DIFFERENCES

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def names_table() -> str:
    rows = [f"| `{name}` | {reason} |" for name, reason in sorted(UNAVAILABLE.items())]
    return "\n".join(["| Monarch's name | here |", "|---|---|", *rows])


def signatures_table() -> str:
    rows = [f"| `{name}` | {reason} |" for name, reason in sorted(DIFFERENCES.items())]
    return "\n".join(["| what | here |", "|---|---|", *rows])


def settings_table() -> str:
    reasons: dict[str, list[str]] = {}
    for name, reason in sorted(REFUSED.items()):
        reasons.setdefault(reason, []).append(f"`{name}`")
    rows = [f"| {', '.join(names)} | {reason} |" for reason, names in reasons.items()]
    return "\n".join(["| settings | why a session cannot apply them |", "|---|---|", *rows])


def job_names_table() -> str:
    state = {**{name: f"`{place}`" for name, place in AVAILABLE_JOB_NAMES.items()}, **UNAVAILABLE_JOB_NAMES}
    rows = [f"| `{name}` | {here} |" for name, here in sorted(state.items())]
    return "\n".join(["| Monarch's name | here |", "|---|---|", *rows])


def results_table(release: str, areas: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """``areas``: the results by area, side and case, as ``conformance`` writes them to its JSON file."""
    rows, differences = [], []
    for area, sides in areas.items():
        passed = {side: sum(result["passed"] for result in results.values()) for side, results in sides.items()}
        rows.append(f"| {area} | {len(sides['direct'])} | {passed['direct']} | {passed['gateway']} |")
        for case, direct in sides["direct"].items():
            if direct["passed"] and not sides["gateway"].get(case, {}).get("passed"):
                differences.append(f"- {area}: {case.replace('_', ' ')}")
    listed = ["", "Differences, each a defect to fix:", "", *differences] if differences else ["", "No differences."]
    head = [f"With torchmonarch {release}:", "", "| area | cases | pass on direct Monarch | pass through the gateway |"]
    return "\n".join([*head, "|---|---|---|---|", *rows, *listed])
