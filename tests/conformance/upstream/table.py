"""The report of a run: every test of every file, and a summary for docs/compatibility.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from tests.conformance.upstream.applicability import RULES, Verdict
from tests.conformance.upstream.running import Results
from tests.conformance.upstream.tree import Test

PASSED = "passed on both"
FAILED = "failed here"
NOT_DIRECTLY = "does not pass on direct Monarch"
NOT_APPLICABLE = "not applicable"
NOT_RUN = "not run"
STATES = (PASSED, FAILED, NOT_DIRECTLY, NOT_APPLICABLE, NOT_RUN)

# Tests that apply by the rules and fail here because the product is so on purpose, by name. They count as failed.
_NO_ACTORS = "the program's own process runs no actors: this_proc() is a process on a host"
_BIND_TO = "SlurmJob(bind_to=) is refused: each worker listens on the address by which it reaches the gateway"
_NO_PREFIX = "messages of logging in actors have no [actor=…] prefix: each shown line has its rank"
_CREDENTIALS = "the output of a credential plugin is JSON, as the kubernetes package reads it, and the error says so"
_READ_ONLY = "telemetry can only be read (docs/security.md)"
BY_DESIGN: dict[str, str] = {
    "test_bind_to_rejects_values_that_are_not_ip_addresses": _BIND_TO,
    "test_can_run_compares_bind_to": _BIND_TO,
    "test_this_proc_on_root_client_spawns_actor_in_client_os_process": _NO_ACTORS,
    "test_proc_mesh_on_root_client_spawns_actor_in_client_os_process": _NO_ACTORS,
    "test_this_proc_in_controller_spawns_actor_in_client_os_process": _NO_ACTORS,
    "test_context_proc_mesh_in_controller_spawns_actor_in_client_os_process": _NO_ACTORS,
    "test_controllers_have_same_pid_as_client": "controllers run on the first host, not in the program's process",
    "test_fork_from_client_process_actor": _NO_ACTORS,
    "test_instance_name": _NO_PREFIX,
    "test_actor_logging_smoke": _NO_PREFIX,
    "test_exec_credential_output_must_be_an_object": _CREDENTIALS,
    "test_malformed_exec_credential_output_is_rejected": _CREDENTIALS,
    "test_store_pyspy_dump_and_query": _READ_ONLY,
    "test_store_pyspy_dump_with_unknown_proc_ref": _READ_ONLY,
    "test_snapshot_periodic_capture_populates_tables": (
        "admin_addr='[::]:0' is refused: the admin server has no password, so it listens on loopback"
    ),
    "test_collector_telemetry_is_ingested_once": "the session's engine collects: telemetry has no host mesh",
    "test_custom_metric": "metrics that the program itself records are dropped: only actors' are kept",
    "test_query_after_stopping_actor_mesh": "a call to a stopped mesh is refused before it becomes a message",
    "test_supervision_with_sending_error": (
        "the call fails with the cause, 'rejecting oversize frame', where Monarch reports the actor as unhealthy"
    ),
    "test_stop_only_drains_own_mesh_procs": (
        "state() always returns the same host mesh, and its stop() ends everything that the session runs there"
    ),
}


@dataclass(frozen=True)
class File:
    name: str
    verdicts: Mapping[Test, Verdict]


class Row(TypedDict):
    file: str
    test: str  # "" for a file without tests
    state: str
    reason: str
    commit: str  # of the run through the gateway
    day: str


def rows_of(files: Sequence[File], results: Results) -> list[Row]:
    """A row for each test, and one for each file without any."""
    rows = []
    for file in files:
        if not file.verdicts:
            rows.append(Row(file=file.name, test="", state=NOT_APPLICABLE, reason="holds no tests", commit="", day=""))
        rows += [_row(test, verdict, results) for test, verdict in file.verdicts.items()]
    return rows


def _row(test: Test, verdict: Verdict, results: Results) -> Row:
    direct, gateway = results.get(test.id, "direct"), results.get(test.id, "gateway")
    ran = gateway or direct
    state, reason = PASSED, ""
    if verdict.rule:
        state, reason = NOT_APPLICABLE, ": ".join(filter(None, (RULES[verdict.rule], verdict.detail)))
    elif direct is None:
        state = NOT_RUN
    elif direct.outcome != "passed":
        state, reason = NOT_DIRECTLY, f"{direct.outcome}: {direct.error}"
    elif gateway is None:
        state = NOT_RUN
    elif gateway.outcome != "passed":
        state, reason = FAILED, BY_DESIGN.get(test.name.split("::")[-1], gateway.error or gateway.outcome)
    return Row(
        file=test.file, test=test.name, state=state, reason=reason,
        commit=ran.commit if ran else "", day=ran.day if ran else "",
    )  # fmt: skip


def share(rows: Sequence[Row]) -> tuple[int, int]:
    """How many pass here of how many that pass on direct Monarch and apply."""
    states = Counter(row["state"] for row in rows)
    return states[PASSED], states[PASSED] + states[FAILED]


def full_table(release: str, rows: Sequence[Row]) -> str:
    """Every test by file, for the file beside the results."""
    lines = [f"# Monarch's own tests, torchmonarch {release}", "", *_sentence(release, rows), ""]
    for file in dict.fromkeys(row["file"] for row in rows):
        lines += [f"## {file}", "", "| test | result | reason |", "|---|---|---|"]
        lines += [
            f"| `{row['test']}` | {row['state']} | {_cell(row['reason'])} |" for row in rows if row["file"] == file
        ]
        lines.append("")
    return "\n".join(lines)


def summary(release: str, rows: Sequence[Row]) -> str:
    """The numbers of each file, the rules by how many tests they leave out, and the tests that fail here, by name."""
    lines = [*_sentence(release, rows), "", f"| file | tests | {' | '.join(STATES[:4])} |", "|---|---|---|---|---|---|"]
    for file in dict.fromkeys(row["file"] for row in rows):
        of_file = [row for row in rows if row["file"] == file and row["test"]]
        counts = Counter(row["state"] for row in of_file)
        lines.append(f"| `{file}` | {len(of_file)} | {' | '.join(str(counts[state]) for state in STATES[:4])} |")
    reasons = Counter(row["reason"].split(":")[0] for row in rows if row["state"] == NOT_APPLICABLE and row["test"])
    lines += ["", "| why a test does not apply | tests |", "|---|---|"]
    lines += [f"| {reason} | {count} |" for reason, count in reasons.most_common()]
    failed = [row for row in rows if row["state"] == FAILED]
    if failed:
        lines += ["", "| test that fails here | why |", "|---|---|"]
        lines += [f"| `{row['file']}::{row['test']}` | {_cell(row['reason'])} |" for row in failed]
    return "\n".join(lines)


def _sentence(release: str, rows: Sequence[Row]) -> list[str]:
    passed, of = share(rows)
    states = Counter(row["state"] for row in rows if row["test"])
    ran = [row for row in rows if row["state"] in (PASSED, FAILED)]
    words = [
        f"With torchmonarch {release}: of {states.total()} tests,",
        f"{_count(states[NOT_APPLICABLE], 'does', 'do')} not apply and",
        f"{_count(states[NOT_DIRECTLY], 'does', 'do')} not pass on direct Monarch on this machine.",
        f"Of the other {of}, {_count(passed, 'passes', 'pass')} through a gateway",
    ]
    sentence = " ".join(words) + (f", {100 * passed / of:.1f} %." if of else ".")
    if states[NOT_RUN]:
        sentence += f" {_count(states[NOT_RUN], 'was', 'were')} not run."
    if ran:
        days = sorted(row["day"] for row in ran)
        commits = sorted({row["commit"] for row in ran})
        sentence += f" They were run from {days[0]} to {days[-1]} UTC, on commit {', '.join(commits)}."
    return [sentence]


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
