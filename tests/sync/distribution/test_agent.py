from __future__ import annotations

import socket
from pathlib import Path

import pytest

from meshgate_sync.distribution.agent import HostAgent
from meshgate_sync.errors import StoreError
from meshgate_sync.relay.plan import GATEWAY, Routes


def test_an_agent_has_the_address_at_which_others_reach_it(tmp_path: Path) -> None:
    agent = HostAgent("h", secret=b"s", owner="o", home=str(tmp_path / "home"), advertise="10.1.2.3")
    try:
        assert agent.address[0] == "10.1.2.3"
        with socket.create_connection(("127.0.0.1", agent.address[1]), timeout=10):
            agent.configure(Routes((GATEWAY,), ()), {GATEWAY: ("127.0.0.1", 1)})
    finally:
        agent.stop()
        agent.stop()


def test_an_agent_that_cannot_listen_leaves_nothing_behind(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        HostAgent("h", secret=b"s", owner="o", home=str(tmp_path / "home"), port=taken.getsockname()[1])
    assert list((tmp_path / "home" / "work").iterdir()) != []
    HostAgent("h", secret=b"s", owner="o", home=str(tmp_path / "home")).stop()


def test_a_home_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/home"):
        HostAgent("h", secret=b"s", owner="o", home=str(tmp_path / "file" / "home"))


def test_the_pins_of_an_agent_end_with_it(tmp_path: Path) -> None:
    agent = HostAgent("h", secret=b"s", owner="driver", home=str(tmp_path / "home"))
    agent._store.snapshots.pin("driver", b"r" * 32)
    agent.stop()
    assert list((tmp_path / "home" / "pins").iterdir()) == []
