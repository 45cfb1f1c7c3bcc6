"""The examples and the programs in the documents run as they are, exit with 0, and leave nothing behind."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import programs_in, python_blocks
from tests.programs import ROOT, run_program


def test_the_quickstart_runs(tmp_path: Path) -> None:
    printed = run_program(ROOT / "examples" / "quickstart.py", tmp_path)
    assert re.search(r"the gateway is at ws://127\.0\.0\.1:\d+", printed)
    assert "the mesh of processes: {'hosts': 2, 'gpus': 2}" in printed
    assert "the result is a ValueMesh" in printed
    for rank in range(4):
        host, gpu = divmod(rank, 2)
        assert f"{{'hosts': {host}, 'gpus': {gpu}}} -> loss" in printed
        assert re.search(rf"\[workers-{host} trainers rank {rank}\] 32 samples seen", printed)
    assert "ActorError with the original exception, ZeroDivisionError('division by zero')" in printed
    assert "the actors still work: [0.0, 0.5, 1.0, 1.5]" in printed
    assert len(re.findall(r"^   \(\d+\.\d\d s\)$", printed, re.MULTILINE)) == 5
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.timeout(400)
def test_distributed_training_ends_with_equal_weights(tmp_path: Path) -> None:
    printed = run_program(ROOT / "examples" / "ddp.py", tmp_path, timeout=300)
    assert "4 ranks have equal weights, with the sum " in printed
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("document", ["docs/index.md", "docs/jobs.md", "docs/tutorial_cluster.md"])
def test_programs_in_documents_run_as_pasted(document: str, tmp_path: Path) -> None:
    for program in programs_in(document):
        run_program(program, tmp_path)
        assert os.listdir(tmp_path) == ["program.py"]


def test_programs_before_and_after_a_move_print_the_same(tmp_path: Path) -> None:
    monarch, meshgate, moved_from_ray = programs_in("docs/migrating.md")
    assert run_program(monarch, tmp_path, strict=False) == run_program(meshgate, tmp_path) == "[30, 31, 32, 33]\n"
    assert run_program(moved_from_ray, tmp_path) == "[5, 5, 5, 5]\n"


def test_the_program_in_the_readme_prints_the_answer_of_each_rank(tmp_path: Path) -> None:
    (program,) = programs_in("README.md")
    printed = run_program(program, tmp_path)
    for rank in range(4):
        assert f"rank {rank} is done" in printed
    assert "a step of 32 samples" in printed


def test_the_tutorial_on_live_code_can_be_followed(tmp_path: Path) -> None:
    blocks = python_blocks(ROOT / "docs" / "tutorial_live.md")
    for name, block in zip(("rule.py", "trainer.py", "train.py"), blocks, strict=True):
        (tmp_path / name).write_text(block.code)
    rule = tmp_path / "rule.py"
    with subprocess.Popen(
        [sys.executable, "train.py"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as program:  # fmt: skip
        assert program.stdin is not None
        assert program.stdout is not None

        def wait_for(text: str) -> None:
            assert any(text in line for line in iter(program.stdout.readline, "")), text  # type: ignore[union-attr]

        wait_for("0 [0.3, 0.3]")
        rule.write_text(rule.read_text().replace("0.1", "0.5"))
        wait_for("synced 1 file")
        program.stdin.write("\n")
        program.stdin.flush()
        wait_for("1 [1.65, 1.65]")
        rule.write_text(rule.read_text().replace("3.0)", "3.0"))
        wait_for("rule.py:2: '(' was never closed")
        wait_for("synced 1 file")
        printed, _ = program.communicate("\n")
    assert "SyntaxError: '(' was never closed" in printed
    assert program.returncode == 1
