from __future__ import annotations

import io
import json
import socket
from pathlib import Path

import pytest

from meshgate_sync.agent import HostAgent
from meshgate_sync.errors import StoreError
from meshgate_sync.plan import GATEWAY, Routes
from meshgate_sync.serve import main


def test_an_agent_tells_the_address_that_others_reach_it_at(tmp_path: Path) -> None:
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


def test_a_home_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/home"):
        HostAgent("h", secret=b"s", owner="o", home=str(tmp_path / "file" / "home"))


def test_an_agent_s_pins_end_with_it(tmp_path: Path) -> None:
    agent = HostAgent("h", secret=b"s", owner="driver", home=str(tmp_path / "home"))
    agent._store.snapshots.pin("driver", b"r" * 32)
    agent.stop()
    assert list((tmp_path / "home" / "pins").iterdir()) == []


def test_serving_ends_with_the_input(tmp_path: Path) -> None:
    first = {"name": "h", "secret": "00", "owner": "o", "home": str(tmp_path / "home")}
    second = {"routes": {"control": [GATEWAY], "stripes": [[GATEWAY]]}, "addresses": {GATEWAY: ["127.0.0.1", 1]}}
    out = io.StringIO()
    main(io.StringIO(f"{json.dumps(first)}\n{json.dumps(second)}\n"), out)
    address, configured = (json.loads(line) for line in out.getvalue().splitlines())
    assert address["address"][0] == "127.0.0.1"
    assert configured == {"configured": True}
