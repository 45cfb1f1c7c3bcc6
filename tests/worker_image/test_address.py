from __future__ import annotations

import socket
from pathlib import Path

import pytest

from meshgate_worker.address import AddressError, ListeningAt, listening_at


@pytest.mark.parametrize(
    ("address", "family", "socket_address"),
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
def test_the_listening_socket_is_parsed_from_the_address(address: str, family: int, socket_address: object) -> None:
    assert listening_at(address) == ListeningAt(family, socket_address)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "address",
    ["", "ipc://", "ipc://@abstract", "tcp://", "tcp://host", "tcp://:1", "tcp://h:x", "tcp://h:99999", "h:1"],
)
def test_an_unsupported_address_raises(address: str) -> None:
    with pytest.raises(AddressError) as error:
        listening_at(address)
    assert repr(address) in str(error.value)


def test_accepts_is_true_only_while_a_process_listens(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listening = listening_at(f"ipc://{path}")
    assert not listening.accepts(1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert not listening.accepts(1)
        listener.listen()
        assert listening.accepts(1)
    assert not listening.accepts(1)


def test_clear_removes_a_stale_socket_and_its_directory_if_empty(tmp_path: Path) -> None:
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
