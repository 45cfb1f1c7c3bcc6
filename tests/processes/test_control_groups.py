"""The control groups that limit the memory of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshgate_processes.control_groups import memory_groups, memory_limit

OWN_GROUPS = "4:hugetlb,memory:/slurm/job_1\n3:cpu:/slurm\n0::/pod/container\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(OWN_GROUPS)
    return tmp_path


def test_the_own_group_and_all_around_it_count_in_both_versions(proc: Path) -> None:
    found = [(version, str(group.relative_to(proc))) for version, group in memory_groups(proc, proc)]
    assert found == [
        *((1, "memory/slurm/job_1"), (1, "memory/slurm"), (1, "memory")),
        *((2, "pod/container"), (2, "pod"), (2, ".")),
    ]
    assert list(memory_groups(proc / "none", proc)) == []


@pytest.mark.parametrize(
    "file", ["memory/slurm/job_1/memory.limit_in_bytes", "memory/slurm/memory.limit_in_bytes", "pod/memory.max"]
)
def test_the_lowest_limit_of_a_group_is_the_limit(proc: Path, file: str) -> None:
    machine = memory_limit(proc, proc)
    (proc / file).parent.mkdir(parents=True, exist_ok=True)
    (proc / file).write_text("300000000\n")
    (proc / "memory.max").write_text("max\n")
    assert memory_limit(proc, proc) == 300_000_000 < machine
