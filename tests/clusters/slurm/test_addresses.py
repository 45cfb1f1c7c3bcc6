"""The address at which nodes reach this machine."""

from __future__ import annotations

import pytest

from meshgate_slurm import commands
from meshgate_slurm.addresses import own_address
from meshgate_slurm.errors import SlurmError


def test_the_address_is_that_of_the_route_to_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "node_address", lambda partition: "127.0.0.1")
    assert own_address("gpu") == "127.0.0.1"


def test_any_node_will_do_for_a_partition_without_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "node_address", lambda partition: None if partition else "127.0.0.1")
    assert own_address("empty") == "127.0.0.1"
    monkeypatch.setattr(commands, "node_address", lambda partition: None)
    with pytest.raises(SlurmError, match="lists no nodes"):
        own_address("empty")
