"""Images as chains of steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshgate import Image
from meshgate.images.plan import Copy, PipInstall, RunBash, SetEnvVars, SyncPackage


def test_a_step_returns_a_new_image() -> None:
    base = Image(name="base").run_bash("a")
    extended = base.run_bash("b")
    assert (base.steps, extended.steps) == ((RunBash("a"),), (RunBash("a"), RunBash("b")))


def test_packages_that_every_worker_has_are_not_installed() -> None:
    assert Image().pip_install(["torchmonarch"]).live_steps == ()
    assert Image().pip_install(["torchmonarch", "numpy"]).live_steps == (PipInstall(("torchmonarch", "numpy")),)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda image: image.pip_install(3), "pip_install(3): expected one or more packages, such as ['numpy']"),
        (lambda image: image.run_bash(["ls"]), "run_bash(['ls']): expected one command as a string"),
        (lambda image: image.set_env_vars(["A=1"]), "set_env_vars(['A=1']): expected values by name, such as {"),
    ],
)
def test_arguments_of_wrong_types_are_rejected(build: Callable[[Any], Image], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        build(Image())
    assert str(caught.value).startswith(message)


def test_local_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    image = Image().copy("data").copy("data", "/app/").sync_package("package")
    data = (f"{tmp_path}/data",)
    assert image.steps == (Copy(data, "data"), Copy(data, "/app/"), SyncPackage(f"{tmp_path}/package"))


def test_variables_are_set_as_text() -> None:
    assert Image().set_env_vars({"A": 1}).steps == (SetEnvVars((("A", "1"),)),)  # type: ignore[dict-item]


@pytest.mark.parametrize("entry", ["-e .", "-r requirements.txt", "--target=/x"])
def test_pip_options_that_meshgate_decides_are_rejected(entry: str) -> None:
    option = entry.replace("=", " ").split()[0]
    with pytest.raises(ValueError, match=rf"pip_install\(\['{entry}'\]\): {option} is not supported; "):
        Image().pip_install([entry])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Image().from_docker(" "), "is not an image reference"),
        (lambda: Image().pip_install([]), "expected one or more packages"),
        (lambda: Image().set_env_vars({"1A": "x"}), "'1A' is not a valid variable name"),
        (lambda: Image().run_bash(" "), "the command is empty"),
        (lambda: Image.from_dockerfile("/absent/Dockerfile"), "there is no Dockerfile at /absent/Dockerfile"),
    ],
)
def test_invalid_arguments_are_rejected(build: Callable[[], Image], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
