"""The digests decide what runs again."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from meshgate import Image
from meshgate.images.plan import Order, plan


def digests(image: Image) -> list[str]:
    return [order.digest for order in plan(image.live_steps)]


def names(order: Order) -> list[str]:
    assert order.content is not None
    file = io.BytesIO()
    order.content.write_tar(file)
    file.seek(0)
    with tarfile.open(fileobj=file) as tar:
        return sorted(tar.getnames())


def test_a_changed_step_changes_its_digest_and_those_that_follow() -> None:
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


def test_images_are_values() -> None:
    base = Image(name="base").run_bash("a")
    base.run_bash("b")
    assert len(base.steps) == 1


def test_what_every_worker_has_is_not_installed() -> None:
    assert Image().pip_install(["torchmonarch"]).live_steps == ()


def test_nothing_to_copy_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"nothing to copy at {tmp_path}/absent"):
        plan(Image().copy(tmp_path / "absent").live_steps)


def test_a_dockerfile_copies_by_wildcards_and_leaves_out_what_dockerignore_names(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c.txt", "sub/d.py", "sub/secret"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".dockerignore").write_text("# not these\n**/secret\n.dockerignore\nDockerfile\n")
    (tmp_path / "Dockerfile").write_text("FROM x\nCOPY *.py /app/\nCOPY . /all\n")
    some, everything = plan(Image.from_dockerfile(tmp_path / "Dockerfile").live_steps)
    assert names(some) == ["a.py", "b.py"]
    assert names(everything) == ["a.py", "b.py", "c.txt", "sub", "sub/d.py"]


def test_a_package_in_development_travels_without_what_tools_leave(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    (package / "__pycache__").mkdir(parents=True)
    for name in ("__init__.py", "__pycache__/x.pyc"):
        (package / name).write_text("")
    (order,) = plan(Image().sync_package(package).live_steps)
    assert names(order) == ["mine/__init__.py"]


@pytest.mark.parametrize("entry", ["-e .", "-r requirements.txt", "--target=/x"])
def test_options_that_contradict_where_packages_go_are_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="pip_install"):
        Image().pip_install([entry])
