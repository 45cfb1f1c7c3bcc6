"""Lists of nodes as Slurm writes them."""

from __future__ import annotations

import pytest

from meshgate_slurm.hostlists import expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10],login", ["n08", "n09", "n10", "login"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("gpu-[1,3-4]-a", ["gpu-1-a", "gpu-3-a", "gpu-4-a"]),
    ],
)
def test_lists_are_expanded_in_order(text: str, names: list[str]) -> None:
    assert list(expand(text)) == names


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]", "n]1", "n[0-99999999]"])
def test_malformed_and_huge_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        expand(text)
