"""The guide to CI: its account, its program and the steps of its workflow, as they are on the page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

from meshgate_kubernetes.manifests.names import JOB_LABEL
from tests.documents import code_blocks, programs_in
from tests.kubernetes.cluster import KINDS, Kubectl
from tests.programs import ROOT

GUIDE = ROOT / "docs" / "ci.md"


def bash(script: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-e", "-o", "pipefail", "-c", script]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # with this environment's meshgate
    environment = {**os.environ, "PATH": path, **variables}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


def test_the_workflow_of_the_guide_reports_success_and_failure_and_leaves_nothing(
    namespace: str, kubectl: Kubectl, images: tuple[str, str], tmp_path: Path
) -> None:
    (role,) = [block.code for block in code_blocks(ROOT / "docs/kubernetes.md", "yaml") if "kind: Role\n" in block.code]
    (tmp_path / "role.yaml").write_text(role)
    for block in code_blocks(GUIDE, "sh"):
        script = block.code.replace("kubectl create namespace ci\n", "").replace("-n ci", f"-n {namespace}")
        script = script.replace("=ci:ci", f"={namespace}:ci").replace("--namespace=ci", f"--namespace={namespace}")
        done = bash(script, tmp_path)
        assert done.returncode == 0, done.stderr
    (program,) = programs_in("docs/ci.md")
    (workflow,) = code_blocks(GUIDE, "yaml")
    steps = {step.get("name"): step.get("run") for step in yaml.safe_load(workflow.code)["jobs"]["cluster"]["steps"]}
    variables = {"KUBECONFIG": str(tmp_path / "ci.kubeconfig"), "JOB": "ci-1"}

    def step(name: str) -> subprocess.CompletedProcess[str]:
        return bash(steps[name].replace("-n ci", f"-n {namespace}"), tmp_path, **variables)

    (tmp_path / "check.py").write_text(program.replace('namespace="ci"', f'namespace="{namespace}"'))
    done = step("run")
    assert done.returncode == 0, (tmp_path / "result.json").read_text() + done.stderr
    (tmp_path / "check.py").write_text((tmp_path / "check.py").read_text().replace("< 0.5", "< 0.1"))
    assert step("run").returncode == 1
    assert "[0.25, 0.25]" in step("explain").stdout
    assert step("clean up").returncode == 0
    assert kubectl("get", KINDS, "-l", f"{JOB_LABEL}=ci-1", "-o", "name") == ""
