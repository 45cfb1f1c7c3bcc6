"""The part of a node that goes with some of its GPUs."""

from __future__ import annotations

import pytest

from meshgate_slurm.commands import SlurmError, share_of_node


def test_the_share_is_that_of_the_smallest_node_with_enough_gpus() -> None:
    nodes = [(64, 512_000, "gpu:a100:8(S:0-1),nvme:1"), (32, 100_000, "gpu:4"), (4, 8000, "(null)")]
    assert share_of_node(nodes, 2) == (16, 50_000)
    assert share_of_node(nodes, 8) == (64, 512_000)
    with pytest.raises(SlurmError, match="no node of the partition has 9 GPUs"):
        share_of_node(nodes, 9)
