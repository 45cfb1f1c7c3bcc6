"""``python -m tests.conformance [--docs] [AREA ...]``: every case on direct Monarch and through a gateway, in one run.

Prints the cases by area and keeps the results of each release in build/conformance-RELEASE.json. With ``--docs`` it
writes them to the tables of docs/compatibility.md, with those of areas that earlier runs kept. Exits with 1 if a case
passes on direct Monarch and fails through the gateway. ``--upstream DIR`` runs Monarch's own tests instead
(tests/conformance/upstream/command.py).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import pkgutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.sections import write_section
from tests.conformance import areas
from tests.conformance.page import PAGE, job_names_table, names_table, results_table, settings_table
from tests.conformance.side import SIDES, cases_of

ROOT = Path(__file__).parents[2]
AREA_SECONDS = 900


def main(arguments: Sequence[str]) -> int:
    wanted = [each for each in arguments if each != "--docs"]
    known = [module.name for module in pkgutil.iter_modules(areas.__path__)]
    if "--help" in arguments or "-h" in arguments:
        print(__doc__, f"Areas: {', '.join(known)}.", sep="\n")
        return 0
    if "--upstream" in arguments:
        from tests.conformance.upstream.command import main as run_upstream

        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends what runs, as Ctrl-C does
        return run_upstream([each for each in arguments if each != "--upstream"])
    if unknown := set(wanted) - set(known):
        sys.exit(f"no such area: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    release = importlib.metadata.version("torchmonarch")
    print(f"torchmonarch {release}")
    results = {area: {side: _run(side, area) for side in SIDES} for area in wanted or known}
    differing = 0
    for area, sides in results.items():
        names = cases_of(importlib.import_module(f"tests.conformance.areas.{area}"))
        print(f"\n{area}")
        for name in names:
            direct, gateway = (sides[side].get(name, _lost()) for side in SIDES)
            differing += direct["passed"] and not gateway["passed"]
            print(f"  direct {_mark(direct)}  gateway {_mark(gateway)}  {name.replace('_', ' ')}")
            for side, result in (("direct", direct), ("gateway", gateway)):
                if result["error"]:
                    print(f"      {side}: {result['error']}")
    cases = sum(len(sides["direct"]) for sides in results.values())
    print(f"\n{cases} cases; {differing} pass on direct Monarch and fail through the gateway")
    record = ROOT / "build" / f"conformance-{release}.json"
    record.parent.mkdir(exist_ok=True)
    kept = json.loads(record.read_text()) if record.exists() else {}
    kept = {area: kept[area] for area in kept if area in known} | results
    record.write_text(json.dumps(kept, indent=1))
    if "--docs" in arguments:
        write_section(PAGE, "names", names_table())
        write_section(PAGE, "settings", settings_table())
        write_section(PAGE, "job names", job_names_table())
        series = ".".join(release.split(".")[:2])
        write_section(PAGE, f"results {series}", results_table(release, {area: kept[area] for area in sorted(kept)}))
    return 1 if differing else 0


def _run(side: str, area: str) -> dict[str, dict[str, Any]]:
    """The results of an area's cases on one side, by name."""
    command = [sys.executable, "-m", "tests.conformance.side", side, area]
    environment = {**os.environ, "HYPERACTOR_MESH_ENABLE_LOG_FORWARDING": "true"}  # Monarch sends no output otherwise
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=AREA_SECONDS, check=False
        )
        output, trouble = done.stdout, done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired as expired:
        output, trouble = (expired.stdout or b"").decode(), f"not over within {AREA_SECONDS} s"
    if trouble:
        print(f"{side} {area}: {trouble[-2000:]}", file=sys.stderr)
    records = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
    return {record["case"]: record for record in records}


def _mark(result: dict[str, Any]) -> str:
    return "pass" if result["passed"] else "FAIL"


def _lost() -> dict[str, Any]:
    return {"passed": False, "error": "the process ended before this case"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
