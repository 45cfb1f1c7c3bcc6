"""The trees that are synced, and the changes between two syncs. A change returns the paths a watcher would report."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

LARGE = 100_000_000
_NAMES = [f"name_{number}" for number in range(500)]
_SYLLABLES = [bytes([97 + number % 26, 97 + number // 26, 32][: 2 + number % 2]) for number in range(256)]
_LINE = Path("package4", "part42", "module4242.py")

Change = Callable[[Path, random.Random], Sequence[Path] | None]


def make_sources(tree: Path, rng: random.Random, files: int = 10_000) -> None:
    """10,000 modules of 10 to 90 lines."""
    lines = [f"{rng.choice(_NAMES)} = {rng.choice(_NAMES)!r} * {rng.randrange(10**6)}" for _ in range(5000)]
    for number in range(files):
        path = tree / f"package{number // 1000}" / f"part{number // 100}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"number = {number}\n" + "\n".join(rng.choices(lines, k=rng.randrange(10, 90))) + "\n")


def make_cold(tree: Path, rng: random.Random) -> None:
    """200 MB under new names: half in 1,000 text files, half in four files that do not compress."""
    top = tree / f"cold{rng.randrange(10**9)}"
    for number in range(1000):
        directory = top / f"d{number // 100}"
        directory.mkdir(parents=True, exist_ok=True)
        text = b"".join(map(_SYLLABLES.__getitem__, rng.randbytes(40_000)))
        (directory / f"m{number}.txt").write_bytes(text[:100_000].ljust(100_000, b"."))
    for number in range(4):
        (top / f"large{number}.bin").write_bytes(rng.randbytes(25_000_000))


def make_large(tree: Path, rng: random.Random) -> None:
    (tree / "large.bin").write_bytes(rng.randbytes(LARGE))


def change_nothing(tree: Path, rng: random.Random) -> None:
    """Leaves the tree unchanged."""


def change_line(tree: Path, rng: random.Random) -> Sequence[Path]:
    with (tree / _LINE).open("a") as out:
        out.write(f"changed = {rng.random()}\n")
    return [tree / _LINE]


def change_500(tree: Path, rng: random.Random) -> None:
    """As a switch to another branch does; a watcher reports so many that the tree is scanned instead."""
    for path in rng.sample(sorted(tree.glob("*/*/*.py")), 500):
        path.write_text(path.read_text() + f"changed = {rng.random()}\n")


def change_byte(tree: Path, rng: random.Random) -> None:
    with (tree / "large.bin").open("r+b") as file:
        place = rng.randrange(LARGE)
        file.seek(place)
        before = file.read(1)[0]
        file.seek(place)
        file.write(bytes([before ^ 1]))


def replace_all(tree: Path, rng: random.Random) -> None:
    """Replaces the tree with another one of 200 MB."""
    for entry in os.scandir(tree):
        shutil.rmtree(entry.path) if entry.is_dir() else os.unlink(entry.path)
    make_cold(tree, rng)
