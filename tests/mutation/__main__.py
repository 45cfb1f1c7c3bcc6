"""Plants small defects in the parts that must never be wrong, and counts those that their tests find (``make mutate``).

    make mutate                                   a sample of each part
    make mutate ARGS="sessions store --each 40"   some parts, with 40 mutants of each
    make mutate ARGS="relay --module upstream"    all mutants of one module

Each mutant is a copy of the sources in which one module differs; ``mutants.py`` says how. Its tests are those of the
module, and if they pass those of the part. A mutant that no test finds survives, and is printed. This is a program of
our own because the tests of a module mirror it: its few seconds of tests decide nearly all its mutants, which a tool
that does not know the mirror runs a whole suite for.

The exit status is 1 if fewer than ``--at-least`` percent were found, and 2 if the tests fail without a defect.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.mutation.mutants import Mutant, mutants_of
from tests.programs import ROOT
from tests.test_structure import FOLDERS, PACKAGES, TESTED_ELSEWHERE, mirrored_test, modules_to_test, name_of

PARTS = {  # part: where its modules are; their tests mirror them
    "wire": ("wire/meshgate_wire",),
    "sessions": ("gateway/meshgate_gateway/sessions",),
    "transport": ("client/meshgate/session/transport",),
    "detached": ("client/meshgate/session/detached.py", "gateway/meshgate_gateway/engine/detached"),
    "calls": ("gateway/meshgate_gateway/engine/calls", "client/meshgate/session/pending_calls.py"),
    "provisioning": ("gateway/meshgate_gateway/provisioning",),
    "store": ("sync/meshgate_sync/store",),
    "relay": ("sync/meshgate_sync/relay",),
    "spmd": ("client/meshgate/jobs/spmd",),
}
EACH = 18  # mutants of a part
SURPLUS_TIME = 30.0  # seconds that tests of a mutant may take in addition to three times those of the original


@dataclass(frozen=True, slots=True)
class Planted:
    """A mutant of ``module``, whose path is relative to the root."""

    part: str
    module: str
    mutant: Mutant

    def __str__(self) -> str:
        return f"{self.module}:{self.mutant.line}: {self.mutant.description}"


class Copy:
    """A copy of the sources and tests in which one module at a time is a mutant."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)

    def passes(self, tests: Sequence[str], timeout: float) -> bool:
        """Runs tests until the first failure. A run that does not end in time has not passed."""
        paths = os.pathsep.join(str(self._folder / root) for root in map(os.path.dirname, PACKAGES))
        command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        process = subprocess.Popen(
            command,
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(timeout) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return False

    def finds(self, planted: Planted, timeout: float) -> bool:
        """Whether a test finds a mutant."""
        file = self._folder / planted.module
        original = file.read_bytes()
        file.write_text(planted.mutant.source)
        try:
            own = tests_of(ROOT / planted.module)
            return not (self.passes([own], timeout) and self.passes(tests_of_part(planted.part), timeout))
        finally:
            file.write_bytes(original)


def modules_of(part: str) -> list[Path]:
    return [
        module
        for place in PARTS[part]
        for folder in FOLDERS
        if folder.is_relative_to(ROOT / place) or folder == (ROOT / place).parent
        for module in modules_to_test(folder)
        if module.is_relative_to(ROOT / place)
        if name_of(module) not in TESTED_ELSEWHERE  # by tests of whole programs
    ]


def tests_of(module: Path) -> str:
    return name_of(mirrored_test(module))


def tests_of_part(part: str) -> list[str]:
    return sorted({str(Path(tests_of(module)).parent) for module in modules_of(part)})


def sample(part: str, each: int, module: str | None, seed: int) -> list[Planted]:
    """Some mutants of a part, the same for the same seed and sources; all those of a module if one is named."""
    found = [
        Planted(part, name_of(path), mutant)
        for path in modules_of(part)
        if module is None or path.stem == module
        for mutant in mutants_of(path.read_text())
    ]
    if module is not None or len(found) <= each:
        return found
    return sorted(random.Random(seed).sample(found, each), key=str)


def run(parts: Sequence[str], options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="meshgate-mutants-") as scratch:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(options.jobs):
            copies.put(Copy(Path(scratch) / str(number)))
        timeouts = {}
        for part in parts:
            copy = copies.get()
            began = time.monotonic()
            if not copy.passes(tests_of_part(part), timeout=1800):
                print(f"the tests of {part} fail without a defect: {' '.join(tests_of_part(part))}", file=sys.stderr)
                return 2
            timeouts[part] = 3 * (time.monotonic() - began) + SURPLUS_TIME
            copies.put(copy)

        def find(planted: Planted) -> bool:
            copy = copies.get()
            try:
                found = copy.finds(planted, timeouts[planted.part])
            finally:
                copies.put(copy)
            print(f"{'found   ' if found else 'SURVIVED'}  {planted}", flush=True)
            return found

        planted = [each for part in parts for each in sample(part, options.each, options.module, options.seed)]
        with ThreadPoolExecutor(options.jobs) as pool:
            found = dict(zip(planted, pool.map(find, planted), strict=True))
    return report(found, options)


def report(found: dict[Planted, bool], options: argparse.Namespace) -> int:
    for part in dict.fromkeys(planted.part for planted in found):
        of_part = [caught for planted, caught in found.items() if planted.part == part]
        print(f"{part:14} {sum(of_part):4} of {len(of_part)} found")
    share = 100 * sum(found.values()) / max(len(found), 1)
    print(f"{'all':14} {sum(found.values()):4} of {len(found)} found, {share:.1f} %")
    if options.json:
        rows = [{"part": each.part, "mutant": str(each), "found": caught} for each, caught in found.items()]
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return int(share < options.at_least)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutate")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--each", type=int, default=EACH, help="mutants of each part (default: %(default)s)")
    parser.add_argument("--module", help="the name of one module, of which all mutants are run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--at-least", type=float, default=95.0, metavar="PERCENT")
    parser.add_argument("--json", metavar="FILE", help="writes each mutant and whether it was found")
    options = parser.parse_args()
    if unknown := sorted(set(options.parts) - PARTS.keys()):
        parser.error(f"no part is called {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    parts = options.parts or list(PARTS)
    if options.module and not any(path.stem == options.module for part in parts for path in modules_of(part)):
        parser.error(f"no module of {', '.join(parts)} is called {options.module}")
    return run(parts, options)


if __name__ == "__main__":
    sys.exit(main())
