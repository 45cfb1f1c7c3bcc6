from __future__ import annotations

import socket
from pathlib import Path

import pytest

from meshgate_worker.address import AddressError, ListeningAt, listening_at


@pytest.mark.parametrize(
    ("address", "family", "where"),
    [
        ("ipc:///tmp/a", socket.AF_UNIX, "/tmp/a"),
        ("service<2MuAHeDjLCEd>@ipc:///tmp/a", socket.AF_UNIX, "/tmp/a"),
        ("tcp://10.0.0.1:26600", socket.AF_INET, ("10.0.0.1", 26600)),
        ("tcp://[fd00::1]:26600", socket.AF_INET6, ("fd00::1", 26600)),
        ("tcp://pod-0.svc:26600@tcp://0.0.0.0:26600", socket.AF_INET, ("127.0.0.1", 26600)),
        ("tcp://pod-0.svc:26600@tcp://[::]:26600", socket.AF_INET6, ("::1", 26600)),
        ("service<2MuAHeDjLCEd>@tcp://pod:1@tcp://0.0.0.0:2", socket.AF_INET, ("127.0.0.1", 2)),
    ],
)
def test_where_a_host_listens_is_in_its_address(address: str, family: int, where: object) -> None:
    assert listening_at(address) == ListeningAt(family, where)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "address",
    ["", "ipc://", "ipc://@abstract", "tcp://", "tcp://host", "tcp://:1", "tcp://h:x", "tcp://h:99999", "h:1"],
)
def test_what_cannot_be_served_is_refused_with_the_forms_that_can(address: str) -> None:
    with pytest.raises(AddressError) as refused:
        listening_at(address)
    assert repr(address) in str(refused.value)


def test_a_host_accepts_only_while_something_listens(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    where = listening_at(f"ipc://{path}")
    assert not where.accepts(1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert not where.accepts(1)
        listener.listen()
        assert where.accepts(1)
    assert not where.accepts(1)


def test_a_stale_socket_is_cleared_and_its_directory_only_when_empty(tmp_path: Path) -> None:
    directory = tmp_path / "hosts"
    directory.mkdir()
    for name in "ab":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / name))
    listening_at(f"ipc://{directory}/a").clear(directory=True)
    assert [path.name for path in directory.iterdir()] == ["b"]
    listening_at(f"ipc://{directory}/b").clear()
    assert directory.exists()
    listening_at(f"ipc://{directory}/b").clear(directory=True)
    assert not directory.exists()
