"""The Helm chart of the provisioning gateway, and the ``helm`` that renders and installs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.programs import ROOT

CHART = ROOT / "deploy" / "helm" / "meshgate"
HELM = shutil.which("helm", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def helm(*arguments: str, values: dict[str, Any] | None = None, timeout: float = 60) -> str:
    """The output of ``helm``, with ``values`` as its values file; fails with the error output."""
    assert HELM is not None
    command = [HELM, *arguments, *(() if values is None else ("--values", "-"))]
    given = None if values is None else json.dumps(values)
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def by_name(manifests: str) -> dict[tuple[str, str], Any]:
    """Objects in YAML, by kind and name."""
    objects = [each for each in yaml.safe_load_all(manifests) if each is not None]
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}
