"""``python -m tests.conformance --upstream DIR [--docs] [--again] [PART ...]``: Monarch's own tests on direct Monarch
and through a gateway.

DIR is a Monarch source tree, a wheel, an unpacked wheel, or the site-packages of an installed torchmonarch, of the
release that is installed here. Each test runs in processes of its own, first on direct Monarch and, if it passes there,
through a gateway. PART is a part of the ids of the tests to run, such as test_port or test_job.py::test_kill; without
any, all run that have no result yet. --again runs those again that failed through the gateway. Results are appended to
build/upstream-RELEASE/results.jsonl as they come; the table of all tests is written to build/upstream-RELEASE/table.md
and table.json, and with --docs its summary to docs/compatibility.md.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.sections import write_section
from meshgate.actors.monarch_settings import REFUSED
from meshgate.actors.monarch_surface import UNAVAILABLE, UNAVAILABLE_JOB_NAMES
from tests.conformance.page import PAGE
from tests.conformance.upstream.applicability import Names, Verdict, judge
from tests.conformance.upstream.driver.gateway.through_gateway import counterpart
from tests.conformance.upstream.running import SIDES, Result, Results, prepare, run_file, stamp
from tests.conformance.upstream.table import File, full_table, rows_of, summary
from tests.conformance.upstream.tree import Test, Tree, copy_tests, open_tree

ROOT = Path(__file__).parents[3]


def main(arguments: Sequence[str], build: Path = ROOT / "build") -> int:
    options = [each for each in arguments if each in ("--docs", "--again")]
    source, *parts = [each for each in arguments if each not in options]
    release = importlib.metadata.version("torchmonarch")
    work = build / f"upstream-{release}"
    tree = open_tree(Path(source).resolve(), work / "wheel")
    if tree.release and tree.release != release:
        sys.exit(f"{source} has the tests of Monarch {tree.release}, but {release} is installed: install theirs")
    files = judge_files(tree)
    applying = [test for file in files for test, verdict in file.verdicts.items() if not verdict.rule]
    print(f"torchmonarch {release}: {sum(len(each.verdicts) for each in files)} tests, {len(applying)} apply")
    results = Results(work / "results.jsonl")
    wanted = [test for test in applying if not parts or any(part in test.id for part in parts)]
    run_all(wanted, tree, work, results, again="--again" in options)
    rows = rows_of(files, results)
    (work / "table.md").write_text(full_table(release, rows))
    (work / "table.json").write_text(json.dumps(rows, indent=1))
    if "--docs" in options:
        write_section(PAGE, f"upstream {'.'.join(release.split('.')[:2])}", summary(release, rows))
    print(summary(release, rows))
    return 0


def judge_files(tree: Tree) -> list[File]:
    """Each file of tests with the verdicts of its tests."""
    names = known_names(tree.tests)
    files = []
    for path in tree.files():
        name = tree.name_of(path)
        verdicts: dict[Test, Verdict] = judge(ast.parse(path.read_text()), name, names)
        files.append(File(name, verdicts))
    return files


def known_names(tests: Path) -> Names:
    """The names of the installed release and of meshgate. ``tests`` is where modules beside the tests are."""
    refused = {f".{name.rsplit('.', 1)[-1]}" if "." in name else name: why for name, why in UNAVAILABLE.items()}
    refused |= {name: why for name, why in UNAVAILABLE.items() if name.startswith("config.")}
    refused |= {f"config.{name}": why for name, why in REFUSED.items()}
    jobs = {name.rsplit(".", 1)[-1]: why for name, why in UNAVAILABLE_JOB_NAMES.items()}
    refused |= {f".{name}": why for name, why in jobs.items() if name.endswith(")")}
    for taken in (".activate", "config.mesh_admin_addr"):  # also a method of others; a setting that the driver drops
        del refused[taken]

    def why_refused(path: str) -> str:
        """``path``: MODULE.NAME, ".MEMBER" of a class, ".CLASS(PARAMETER)", or "config.NAME" of a setting."""
        if path.startswith((".", "config.")):
            return refused.get(path, "")
        module, _, name = path.rpartition(".")
        if module.startswith("monarch.config"):
            return refused.get(f"config.{name}", "")
        return refused.get(name, "") or (jobs.get(name, "") if "job" in module or "spmd" in module else "")

    @functools.cache
    def is_module(path: str) -> bool:
        try:
            return path in sys.modules or importlib.util.find_spec(path) is not None
        except (ImportError, RuntimeError):  # of what contains it; parts of Monarch refuse other versions of torch
            return False

    @functools.cache
    def missing(module: str) -> bool:
        return not ((tests / f"{module}.py").exists() or (tests / module).is_dir() or is_module(module))

    return Names(lambda module, name: counterpart(module, name) is not None, why_refused, is_module, missing)


def run_all(tests: Sequence[Test], tree: Tree, work: Path, results: Results, again: bool) -> None:
    """Runs what has no result yet, and with ``again`` what failed through the gateway."""
    copies = {side: copy_tests(tree, work / side, side == "gateway") for side in SIDES}
    for copy in copies.values():
        prepare(copy)
    for _, of_file in itertools.groupby(tests, key=lambda test: test.file):
        left = list(of_file)
        for side in SIDES:
            known = {test: results.get(test.id, side) for test in left}
            repeated = {test for test, before in known.items() if again and side == "gateway" and not _passed(before)}
            wanted = [test for test, before in known.items() if before is None or test in repeated]
            commit = _commit()  # it may be another than when the run began
            for test, outcome in run_file(wanted, copies[side]):
                before = known[test]
                result = stamp(test, side, outcome, commit, before.runs + 1 if before else 1)
                results.add(result)
                print(f"{side} {result.outcome} {result.seconds:.0f} s {test.id} {result.error}", flush=True)
            left = [test for test in left if _passed(results.get(test.id, side))]


def _passed(result: Result | None) -> bool:
    return result is not None and result.outcome == "passed"


def _commit() -> str:
    """The commit of meshgate, with a plus sign if its product was changed since."""
    command = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*command, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    changed = subprocess.run(
        [*command, "status", "--porcelain", "client", "gateway", "wire"], capture_output=True, text=True, check=True
    )
    return commit.stdout.strip() + ("+" if changed.stdout else "")
