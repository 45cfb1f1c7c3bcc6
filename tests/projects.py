"""A driver's project: the working directory of a test, from which it imports modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def project_in(directory: Path, patch: pytest.MonkeyPatch, files: Mapping[str, str]) -> Iterator[Path]:
    """Writes ``files`` to ``directory`` and makes it the working directory and the first import path. Unloads their
    modules after the block."""
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    patch.chdir(directory)
    patch.syspath_prepend(str(directory))
    yield directory
    for name in files:
        sys.modules.pop(Path(name).stem, None)
