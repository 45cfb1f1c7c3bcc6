"""Digests decide which steps run again, contents hold what a step copies, and steps have titles."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from meshgate import Image
from meshgate.images.plan import (
    Argument,
    Copy,
    PipInstall,
    PlannedStep,
    RunBash,
    SetEnvVars,
    Step,
    SyncPackage,
    WorkDir,
    plan,
    require_sources,
    title,
)


def digests(image: Image) -> list[str]:
    return [step.digest for step in plan(image.live_steps)]


def names(step: PlannedStep) -> list[str]:
    assert step.content is not None
    file = io.BytesIO()
    step.content.write_tar(file)
    file.seek(0)
    with tarfile.open(fileobj=file) as tar:
        return sorted(tar.getnames())


def test_a_changed_step_changes_its_digest_and_later_ones() -> None:
    before = digests(Image().run_bash("a").run_bash("b").run_bash("c"))
    after = digests(Image().run_bash("a").run_bash("B").run_bash("c"))
    assert before[0] == after[0]
    assert len({*before[1:], *after[1:]}) == 4


def test_the_digest_of_a_copy_covers_content_names_and_executable_bits(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_text("1")
    image = Image().copy(tree, "/there")
    seen = [digests(image)]
    for change in (
        lambda: (tree / "a").write_text("2"),
        lambda: (tree / "a").chmod(0o755),
        lambda: (tree / "a").rename(tree / "b"),
        (tree / "empty").mkdir,
        lambda: (tree / "link").symlink_to("b"),
    ):
        change()
        seen.append(digests(image))
    assert len({tuple(each) for each in seen}) == len(seen)
    os.utime(tree / "b", (1, 1))
    assert digests(image) == seen[-1]


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"cannot copy {tmp_path}/absent: it does not exist"):
        plan(Image().copy(tmp_path / "absent").live_steps)


def test_a_link_is_copied_as_the_file_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "v1.json").write_text("1")
    (tmp_path / "config.json").symlink_to("v1.json")
    image = Image().copy(tmp_path / "config.json", "/there/")
    (step,) = plan(image.live_steps)
    assert step.payload["file"] == "config.json"
    assert step.content is not None
    file = io.BytesIO()
    step.content.write_tar(file)
    file.seek(0)
    with tarfile.open(fileobj=file) as tar:
        assert tar.extractfile("config.json").read() == b"1"  # type: ignore[union-attr]
    before = digests(image)
    (tmp_path / "v1.json").write_text("2")
    assert digests(image) != before


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("absent.json")
    image = Image().copy(tmp_path / "config.json")
    for check in (plan, require_sources):
        with pytest.raises(ValueError, match=r"config\.json: it is a link to .*/absent\.json, which does not exist"):
            check(image.live_steps)


def test_a_dockerfile_copies_what_links_in_its_directory_lead_to(tmp_path: Path) -> None:
    app = tmp_path / "app"
    (app / "data").mkdir(parents=True)
    for name in ("app/a.py", "app/secret.py", "app/data/table", "app/data/secret", "outside.py"):
        (tmp_path / name).write_text(name)
    for name, target in (("b.py", "a.py"), ("s.py", "secret.py"), ("latest", "data"), ("out.py", "../outside.py")):
        (app / name).symlink_to(target)
    (app / ".dockerignore").write_text("**/secret*\nout.py\n")
    (app / "Dockerfile").write_text("FROM x\nCOPY *.py /app/\nCOPY latest /app/data\nCOPY out.py /app/\n")
    *inside, outside = Image.from_dockerfile(app / "Dockerfile").live_steps
    assert [names(step) for step in plan(inside)] == [["a.py", "b.py"], ["table"]]
    with pytest.raises(ValueError, match=r"out\.py: it leads to .*/outside\.py, outside the Dockerfile's directory"):
        plan([outside])


def test_a_dockerfile_copy_expands_wildcards_and_obeys_dockerignore(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c.txt", "sub/d.py", "sub/secret"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".dockerignore").write_text("# not these\n**/secret\n.dockerignore\nDockerfile\n")
    (tmp_path / "Dockerfile").write_text("FROM x\nCOPY *.py /app/\nCOPY . /all\n")
    some, everything = plan(Image.from_dockerfile(tmp_path / "Dockerfile").live_steps)
    assert names(some) == ["a.py", "b.py"]
    assert names(everything) == ["a.py", "b.py", "c.txt", "sub", "sub/d.py"]


@pytest.mark.parametrize(
    ("ignored", "copied"),
    [
        ("a\n!a/b", ["a", "a/b", "a/b/c", "a/b/d", "x"]),
        ("a\n!a/b/c", ["a", "a/b", "a/b/c", "x"]),
        ("a\n!**/c", ["a", "a/b", "a/b/c", "x"]),
        ("*\n!a/b/d", ["a", "a/b", "a/b/d"]),
        ("**\n!a/e", ["a", "a/e"]),
        ("a/*\n!a/b", ["a", "a/b", "a/b/c", "a/b/d", "x"]),
        ("!a/b\na", ["x"]),  # the last line decides
        ("a\n!a/b\na/b/c", ["a", "a/b", "a/b/d", "x"]),
        ("a\n!nothing", ["x"]),  # without the directories that would be empty
        ("/a/\n! a/./b/", ["a", "a/b", "a/b/c", "a/b/d", "x"]),
        ("\ufeffa", ["x"]),
        ("**c", ["a", "a/b", "a/b/d", "a/e", "x"]),
        (".", ["a", "a/b", "a/b/c", "a/b/d", "a/e", "x"]),
        ("**", []),
    ],
)
def test_dockerignore_includes_again_as_docker_does(tmp_path: Path, ignored: str, copied: list[str]) -> None:
    for name in ("a/b/c", "a/b/d", "a/e", "x"):
        (tmp_path / "app" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "app" / name).write_text(name)
    app = tmp_path / "app"
    (tmp_path / "app" / ".dockerignore").write_text(ignored + "\n.dockerignore\nDockerfile\n", encoding="utf-8")
    (app / "Dockerfile").write_text("FROM x\nCOPY . /all\n")
    (step,) = plan(Image.from_dockerfile(app / "Dockerfile").live_steps)
    assert names(step) == copied


def test_what_dockerignore_excludes_is_not_copied_by_name(tmp_path: Path) -> None:
    for name in ("a.py", "secret.py"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".dockerignore").write_text("secret*\n")
    (tmp_path / "Dockerfile").write_text("FROM x\nCOPY *.py /app/\nCOPY secret.py /app/\n")
    some, secret = Image.from_dockerfile(tmp_path / "Dockerfile").live_steps
    assert [names(step) for step in plan([some])] == [["a.py"]]
    with pytest.raises(ValueError, match=r"secret\.py: \.dockerignore excludes it"):
        plan([secret])


def test_a_synced_package_excludes_generated_files(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    (package / "__pycache__").mkdir(parents=True)
    for name in ("__init__.py", "__pycache__/x.pyc"):
        (package / name).write_text("")
    (step,) = plan(Image().sync_package(package).live_steps)
    assert names(step) == ["mine/__init__.py"]


def test_missing_sources_are_found_without_reading_any_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    require_sources(Image().copy(tmp_path / "there").sync_package(tmp_path / "there").live_steps)
    for image in (Image().copy(tmp_path / "absent"), Image().sync_package(tmp_path / "absent")):
        with pytest.raises(ValueError, match=f"{tmp_path}/absent.*not exist"):
            require_sources(image.live_steps)


def test_a_special_file_cannot_be_copied(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: it is not a file, directory or symlink"):
        plan(Image().copy(tmp_path).live_steps)


def test_hard_links_are_copied_as_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("content")
    os.link(tmp_path / "a", tmp_path / "b")
    (step,) = plan(Image().copy(tmp_path).live_steps)
    assert step.content is not None
    file = io.BytesIO()
    step.content.write_tar(file)
    file.seek(0)
    with tarfile.open(fileobj=file) as tar:
        assert [tar.extractfile(name).read() for name in ("a", "b")] == [b"content"] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (PipInstall(("a", "b>=2")), "pip install a b>=2"),
        (RunBash("make \\\n  all"), "run make \\ all"),
        (SetEnvVars((("A", "secret"), ("B", "2"))), "set A B"),
        (Argument("V", "1"), "argument V"),
        (WorkDir("/app"), "change directory to /app"),
        (Copy(("/a", "/b"), "/c/"), "copy /a /b to /c/"),
        (Copy(("/a",), ""), "copy /a to ."),
        (SyncPackage("/p"), "sync package /p"),
        (RunBash("x" * 100), f"run {'x' * 67}…"),
    ],
)
def test_a_title_is_short_and_without_values(step: Step, text: str) -> None:
    assert title(step) == text
