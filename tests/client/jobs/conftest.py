from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The path of a job file in a directory that does not exist yet."""
    return str(tmp_path / "cache" / "job.pkl")
