"""Pods that install torchmonarch themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshgate_kubernetes.manifests import monarch_install
from meshgate_kubernetes.manifests.monarch_install import MONARCH_REQUIREMENT, PYTHONPATH
from meshgate_kubernetes.manifests.pods import worker_template
from tests.clusters.kubernetes.objects import Object, job, mesh
from tests.programs import ROOT


def pod_of(**worker: object) -> Object:
    spec = job(mesh(**worker))  # type: ignore[arg-type]
    return worker_template(spec, spec.meshes[0])["spec"]  # type: ignore[no-any-return]


def variable(container: Object, name: str) -> object:
    return next((each["value"] for each in container["env"] if each["name"] == name), None)


def test_nothing_is_installed_unless_it_is_requested() -> None:
    pod = pod_of()
    assert "initContainers" not in pod
    assert variable(pod["containers"][0], "PYTHONPATH") is None


def test_the_release_is_that_of_the_gateways_image() -> None:
    release = MONARCH_REQUIREMENT.removesuffix(".*")
    assert f"{release}." in (ROOT / "constraints.txt").read_text()


def test_the_init_container_is_like_the_worker_but_without_its_devices() -> None:
    pod = pod_of(install_monarch=True, memory="8Gi", gpus=2, secrets=("pip",), env_vars={"PIP_INDEX_URL": "http://x"})
    (init,), (worker,) = pod["initContainers"], pod["containers"]
    for field in ("image", "envFrom", "securityContext", "volumeMounts"):
        assert init[field] == worker[field]
    assert variable(init, "PIP_INDEX_URL") == "http://x"
    assert init["resources"] == {"requests": {"memory": "8Gi"}, "limits": {"memory": "8Gi"}}
    assert {"name": "monarch", "mountPath": "/opt/monarch"} in worker["volumeMounts"]
    assert {"name": "monarch", "emptyDir": {}} in pod["volumes"]


def test_the_users_pythonpath_comes_first_and_pip_does_not_see_what_is_not_there_yet() -> None:
    pod = pod_of(install_monarch=True, env_vars={"PYTHONPATH": "/mine"})
    assert variable(pod["containers"][0], "PYTHONPATH") == f"/mine:{PYTHONPATH}"
    assert variable(pod["initContainers"][0], "PYTHONPATH") is None


def install(tmp_path: Path, pip: str) -> subprocess.CompletedProcess[str]:
    """Runs the init container's program with a pip that does what ``pip`` says."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(pip)
    target = tmp_path / "target"
    target.mkdir()
    return subprocess.run(
        [sys.executable, "-c", monarch_install._INSTALL, str(target), MONARCH_REQUIREMENT],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )


@pytest.mark.parametrize("layout", ["lib/python3.11/site-packages", "local/lib/python3.11/dist-packages"])
def test_the_installed_packages_are_found_in_every_layout(tmp_path: Path, layout: str) -> None:
    made = f"import os, sys; os.makedirs(sys.argv[sys.argv.index('--prefix') + 1] + '/{layout}/numpy')"
    assert install(tmp_path, made).returncode == 0
    assert (tmp_path / "target" / "packages-0" / "numpy").is_dir()


def test_a_failed_installation_says_what_to_do(tmp_path: Path) -> None:
    failed = install(tmp_path, "raise SystemExit(1)")
    assert failed.returncode == 1
    assert "cannot install torchmonarch==0.7.* in this image" in failed.stderr
    assert "PIP_INDEX_URL" in failed.stderr
