"""The examples and the programs in the documents run as they are, exit with 0, and leave nothing behind."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshgate import ProcessJob, job_load
from tests.documents import code_blocks, programs_in, python_blocks
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
@pytest.mark.timeout(900)
def test_distributed_training_ends_with_equal_weights(tmp_path: Path) -> None:
    printed = run_program(ROOT / "examples" / "ddp.py", tmp_path, timeout=300)
    assert "4 ranks have equal weights, with the sum " in printed
    assert os.listdir(tmp_path) == []


def test_a_sweep_reports_each_trial_and_goes_on_after_a_failed_one(tmp_path: Path) -> None:
    printed = run_program(ROOT / "examples" / "sweep.py", tmp_path)
    assert "rate 1.2, momentum 0.0: diverged with rate 1.2" in printed
    losses = [float(loss) for loss in re.findall(r"loss (.+)", printed)]
    assert len(losses) == 11
    assert losses == sorted(losses)
    assert os.listdir(tmp_path) == []


def test_fine_tuning_learns_by_the_recipe_as_it_was_edited(tmp_path: Path) -> None:
    printed = run_program(ROOT / "examples" / "fine_tuning.py", tmp_path)
    found = re.findall(r"^step \d+: loss of names (.+), of English (.+)$", printed, re.MULTILINE)
    names, english = zip(*[(float(name), float(text)) for name, text in found], strict=True)
    assert names[2] < names[0] - 1.5  # after the first edit
    assert english[2] > english[0] + 1.0
    assert english[4] < english[2] - 0.4  # after the second
    assert names[4] < names[0] - 1.4
    assert os.listdir(tmp_path) == []


def test_batch_inference_survives_a_bad_document_and_a_lost_process_and_labels_none_twice(tmp_path: Path) -> None:
    documents = tmp_path / "documents"
    documents.mkdir()
    texts = {
        "bad": "a\0b",
        "large": "this is too large for memory",
        "long": "one two three four five six",
        "short": "one",
    }
    for name, text in texts.items():
        (documents / f"{name}.txt").write_text(text)
    printed = run_program(ROOT / "examples" / "batch_inference.py", tmp_path)
    assert "4 documents, 0 done before" in printed
    assert "bad.txt, attempt 3: not a text" in printed
    assert "large.txt, attempt 1: its process was lost" in printed
    assert printed.endswith("3 labelled, 1 failed\nbad.txt: not a text\n")
    again = run_program(ROOT / "examples" / "batch_inference.py", tmp_path)
    assert "1 documents, 3 done before" in again
    labels = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert sorted((each["document"], each["label"]) for each in labels) == [
        ("large.txt", "long"), ("long.txt", "long"), ("short.txt", "short"),
    ]  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["documents", "labels.jsonl"]


def test_training_goes_on_from_its_checkpoint_after_a_rank_was_killed(tmp_path: Path) -> None:
    printed = run_program(ROOT / "examples" / "lost_hosts.py", tmp_path)
    losses = [(int(step), float(loss)) for step, loss in re.findall(r"^step (\d+): loss (.+)$", printed, re.MULTILINE)]
    assert losses == [(step, pytest.approx(0.75**step, abs=1e-4)) for step in range(1, 13)]
    assert re.search(r"going on from step 6: .*Killed\(sig=9\)", printed, re.DOTALL)
    assert "rank 1 of mesh 'trainers' on workers-1" in printed
    assert "trained to step 12: " in printed
    assert os.listdir(tmp_path) == []


def test_samples_that_stay_in_the_cluster_train_a_model(tmp_path: Path) -> None:
    printed = run_program(ROOT / "examples" / "kept_samples.py", tmp_path)
    weights = [
        float(weight) for weight in re.findall(r"^step \d+: weight (.+), \d\d+ kB of samples", printed, re.MULTILINE)
    ]
    assert len(weights) == 4
    assert weights[-1] == pytest.approx(3.0, abs=0.5)
    assert "one group, fetched to look at: [" in printed
    assert os.listdir(tmp_path) == []


@pytest.mark.timeout(600)
def test_a_grpo_loop_learns_and_goes_on_after_its_driver_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "grpo.py"), "--steps", "18"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert any(line.startswith("step 4:") for line in killed.stdout)
        killed.kill()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *steps = done.stdout.splitlines()
    assert int(first.removeprefix("starting with step ")) >= 5
    assert steps[-1].startswith("step 18: ")
    assert int(steps[-1].split()[2].rstrip("%")) > 90


def test_a_grpo_loop_runs_for_the_night_without_the_program_that_submitted_it(tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "grpo.py", tmp_path)
    command = [sys.executable, "grpo.py", "--steps", "18", "--submit"]
    environment = {**os.environ, "MESHGATE_PROGRESS": "off"}  # which a busy machine would decide
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "submitted as night: meshgate runs, meshgate logs --run night -f\n"
    job = job_load(str(tmp_path / ".monarch" / "job_state.pkl"))
    try:
        assert isinstance(job, ProcessJob)
        run = job.run("night")
        printed = "".join(run.logs(follow=True))
        assert run.wait() == 0, printed
        steps = re.findall(r"^step \d+: (\d+)% of 400 answers are right$", printed, re.MULTILINE)
        assert len(steps) == 18
        assert int(steps[-1]) > 90
        assert "the job of the run night, running: it belongs to the user who submitted this program" in printed
    finally:
        job.kill()


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.timeout(600)
def test_distributed_tensors_work_in_a_submitted_program(tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "distributed_tensors.py", tmp_path)
    printed = run_program(tmp_path / "distributed_tensors.py", tmp_path, timeout=240)
    losses = [float(loss) for loss in re.findall(r"^rate 0\.[24]: loss (.+) after 20 steps$", printed, re.MULTILINE)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 1.0


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_says_what_changes_on_gpus(example: Path) -> None:
    assert "On GPUs, " in " ".join((ast.get_docstring(ast.parse(example.read_text())) or "").split())


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # no files in the home directory
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("MESHGATE_PROGRESS", "off")  # which a busy machine would decide
    project = tmp_path / "project"
    project.mkdir()
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    where = {"metadata": {"path": str(project)}}
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3", resources=where).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = "".join(output.get("text", "") + str(output.get("data", "")) for output in outputs)
    stderr = "".join(each.text for each in outputs if each.output_type == "stream" and each.name == "stderr")
    assert stderr.replace("\r", "").strip() == ""
    assert "[0.3, 0.3]" in shown
    assert "[1.65, 1.65]" in shown
    assert shown.count("text/html") >= 3
    assert " at 0x" not in shown  # IPython's text for an object of Monarch's class


@pytest.mark.timeout(900)  # several programs
@pytest.mark.parametrize(
    "document",
    [
        "docs/hanging_ranks.md",
        "docs/jobs.md",
        "docs/kept_values.md",
        "docs/packages.md",
        "docs/ranks.md",
        "docs/tracing.md",
        "docs/tutorial_cluster.md",
        "docs/two_jobs.md",
    ],
)
def test_programs_in_documents_run_as_pasted(document: str, tmp_path: Path) -> None:
    programs = programs_in(document)
    assert programs
    for program in programs:
        run_program(program, tmp_path)
        assert os.listdir(tmp_path) == ["program.py"]


def test_the_program_about_training_scripts_runs_one_on_four_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('import os, sys\n\nprint("rank", os.environ["RANK"], *sys.argv[1:])\n')
    (program,) = programs_in("docs/spmd.md")
    printed = run_program(program, tmp_path)
    assert sorted(re.findall(r"rank (\d) --lr 0\.001$", printed, re.MULTILINE)) == ["0", "1", "2", "3"]


def test_the_program_about_submitting_prints_what_its_run_prints(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('import sys\n\nprint("trained", *sys.argv[1:])\n')
    program = next(block.code for block in python_blocks(ROOT / "docs" / "submit.md"))
    try:
        printed = run_program(program, tmp_path, strict=False)  # a line may say how far a slow submission has come
        assert printed.startswith("trained --lr 1e-3\n0 ")
    finally:
        job_load(str(tmp_path / ".monarch" / "job_state.pkl")).kill()


@pytest.mark.parametrize("document", ["docs/index.md", "docs/notebooks.md"])
def test_pages_show_what_their_programs_print(document: str, tmp_path: Path) -> None:
    (shown,) = code_blocks(ROOT / document, "text")
    (program,) = programs_in(document)
    assert run_program(program, tmp_path) == shown.code
    assert os.listdir(tmp_path) == ["program.py"]


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

        def save(text: str) -> None:
            """At once: a write is seen as two if the machine is busy, since it empties the file first."""
            (new := tmp_path.with_name(f"{tmp_path.name}.rule")).write_text(text)
            new.replace(rule)

        def wait_for(text: str) -> None:
            assert any(text in line for line in iter(program.stdout.readline, "")), text  # type: ignore[union-attr]

        wait_for("0 [0.3, 0.3]")
        save(rule.read_text().replace("0.1", "0.5"))
        wait_for("synced 1 file")
        program.stdin.write("\n")
        program.stdin.flush()
        wait_for("1 [1.65, 1.65]")
        save(rule.read_text().replace("3.0)", "3.0"))
        wait_for("rule.py:2: '(' was never closed")
        wait_for("synced 1 file")
        printed, _ = program.communicate("\n")
    assert "SyntaxError: '(' was never closed" in printed
    assert program.returncode == 1


def test_the_program_about_sessions_returns_to_what_its_first_run_has_started(tmp_path: Path) -> None:
    program, _ = programs_in("docs/sessions.md")
    assert run_program(program, tmp_path) == "started; run this program again\n"
    printed = run_program(program, tmp_path)
    assert "step 50 of 50" in printed
    assert "({'hosts': 1/2}, 'trained')" in printed


@pytest.mark.parametrize(("line", "before"), [("with losses", ""), ("file.write", "future.get(); ")])
def test_the_program_about_tags_runs_each_step_once_though_it_was_killed(
    line: str, before: str, tmp_path: Path
) -> None:
    """Once before the result of a step has arrived, and once before it is saved."""
    _, program = programs_in("docs/sessions.md")
    kill = f"{before}step == 3 and os.kill(os.getpid(), 9)"
    killed = re.sub(rf"^( *){line}", rf"\1{kill}\n\g<0>", program, flags=re.MULTILINE)
    (tmp_path / "program.py").write_text(f"import os\n{killed}")
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=False)
    assert done.returncode == -9
    printed = run_program(program, tmp_path)
    assert re.findall(r"^step (\d+) is done$", printed, re.MULTILINE) == [str(step) for step in range(3, 20)]
    losses = [float(line) for line in (tmp_path / "losses.txt").read_text().splitlines()]
    assert losses == [0.5**step for step in range(1, 21)]
