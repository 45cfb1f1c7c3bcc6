"""Reading GPUs with a stand-in for ``nvidia-smi`` that prints what the real one prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshgate.ranks.usage.gpus import read_gpus, visible_gpus

DEVICES = "0, GPU-aa11, 87, 40536, 81559\n1, GPU-bb22, [N/A], [Not Supported], 81559\n"
APPS = "4711, GPU-aa11, 40100\n4712, GPU-bb22, [N/A]\n"
GPUS = [{"index": 0, "uuid": "GPU-aa11"}, {"index": 1, "uuid": "GPU-bb22"}]


def install(directory: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def test_gpus_and_their_users_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        'test "$2" = --format=csv,noheader,nounits || exit 9\ncase "$1" in\n'
        f"--query-gpu=index,uuid,utilization.gpu,memory.used,memory.total) printf '{DEVICES}';;\n"
        f"--query-compute-apps=pid,gpu_uuid,used_memory) printf '{APPS}';;\n*) exit 9;;\nesac\n"
    )
    install(tmp_path, monkeypatch, body.replace("\n1, ", "\\n1, ").replace("\n4712", "\\n4712"))
    gpus, users, problem = read_gpus()
    assert problem == ""
    assert gpus == [
        {"index": 0, "uuid": "GPU-aa11", "utilization": 87, "memory": 40536 * 2**20, "memory_total": 81559 * 2**20},
        {"index": 1, "uuid": "GPU-bb22", "utilization": None, "memory": None, "memory_total": 81559 * 2**20},
    ]
    assert users == [
        {"pid": 4711, "uuid": "GPU-aa11", "memory": 40100 * 2**20},
        {"pid": 4712, "uuid": "GPU-bb22", "memory": None},
    ]


def test_a_host_without_the_program_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpus() == ([], [], "")


def test_a_failure_says_what_the_program_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed because it could not communicate'; exit 9\n")
    gpus, users, problem = read_gpus()
    assert (gpus, users) == ([], [])
    assert "exit status 9.: NVIDIA-SMI has failed because it could not communicate" in problem
    install(tmp_path, monkeypatch, "echo 'what is this'\n")
    assert read_gpus()[2].startswith("nvidia-smi failed: not enough values")


@pytest.mark.parametrize(
    ("setting", "indexes"),
    [(None, []), ("", []), ("1", [1]), ("1,0", [0, 1]), ("GPU-bb", [1]), ("10", []), ("-1", [])],
)
def test_visible_gpus_are_named_by_index_or_uuid(setting: str | None, indexes: list[int]) -> None:
    assert visible_gpus(setting, GPUS) == indexes
