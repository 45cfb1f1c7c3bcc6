"""A driver's project: a directory that the test is run from and imports modules from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["project_in"]


@contextmanager
def project_in(directory: Path, patch: pytest.MonkeyPatch, files: Mapping[str, str]) -> Iterator[Path]:
    """``directory`` with ``files``, as the driver's working directory and first on its path. What the driver imported
    of them is forgotten after the block."""
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    patch.chdir(directory)
    patch.syspath_prepend(str(directory))
    yield directory
    for name in files:
        sys.modules.pop(Path(name).stem, None)
