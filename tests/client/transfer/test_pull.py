"""Arguments that a pull rejects before it contacts a host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshgate.transfer.pull import pull

HOSTS: Any = [0, 1]


def test_an_empty_remote_path_does_not_pull_the_working_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name a file or a directory"):
        pull(HOSTS, "", tmp_path)


@pytest.mark.parametrize("ranks", [2, -1, [0, 2], [], "0"])
def test_unknown_ranks_are_rejected(tmp_path: Path, ranks: Any) -> None:
    with pytest.raises(ValueError, match="the mesh has ranks 0 to 1"):
        pull(HOSTS, "/remote", tmp_path, ranks)
