"""The examples and the documents' programs run as they stand, end with code 0, and leave nothing behind."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.programs import ROOT, python_blocks, run_program


def test_the_quickstart_shows_the_main_job(tmp_path: Path) -> None:
    printed = run_program(ROOT / "examples" / "quickstart.py", tmp_path)
    assert re.search(r"the gateway is at ws://127\.0\.0\.1:\d+", printed)
    assert "the mesh of processes: {'hosts': 2, 'gpus': 2}" in printed
    assert "the answer is a ValueMesh" in printed
    for rank in range(4):
        host, gpu = divmod(rank, 2)
        assert f"{{'hosts': {host}, 'gpus': {gpu}}} -> loss" in printed
        assert re.search(rf"\[workers-{host} trainers rank {rank}\] 32 samples seen", printed)
    assert "it carries the original, ZeroDivisionError('division by zero')" in printed
    assert "the actors live on: [0.0, 0.5, 1.0, 1.5]" in printed
    assert len(re.findall(r"^   \(\d+\.\d\d s\)$", printed, re.MULTILINE)) == 5
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("document", ["docs/index.md", "docs/jobs.md"])
def test_the_documents_programs_run_as_pasted(document: str, tmp_path: Path) -> None:
    programs = python_blocks(ROOT / document)
    assert programs
    for program in programs:
        run_program(program, tmp_path)
    assert os.listdir(tmp_path) == ["program.py"]


def test_the_readmes_program_prints_each_ranks_answer(tmp_path: Path) -> None:
    (program,) = [block for block in python_blocks(ROOT / "README.md") if "ProcessJob" in block]
    printed = run_program(program, tmp_path)
    for rank in range(4):
        assert f"rank {rank} is done" in printed
    assert "a step of 32 samples" in printed
