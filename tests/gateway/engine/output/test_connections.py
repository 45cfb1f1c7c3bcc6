"""How much of what processes wrote has been read, with socket pairs in place of processes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshgate_gateway.engine.on_worker.output_marks import POSITIONS
from meshgate_gateway.engine.output.connections import CountingReader, MeshOutput, OutputConnection, WorkerHello


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The engine's end and the process's."""
    engine, process = socket.socketpair()
    with engine, process:
        yield engine, process


def connection(engine: socket.socket) -> OutputConnection:
    hello = WorkerHello(secret="", mesh=1, rank=0, pid=7, stream="stdout")
    return OutputConnection(hello, CountingReader(), engine.fileno(), 0)


async def test_what_is_in_the_socket_counts_as_written(pair: tuple[socket.socket, socket.socket]) -> None:
    output = connection(pair[0])
    output.reader.feed_data(b"read")
    assert output.written() == 4
    pair[1].sendall(b"not read")
    assert output.written() == 12


async def test_a_wait_ends_when_so_much_is_handled_or_the_process_has_ended(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    output, woken = connection(pair[0]), list[int]()
    for written in (4, 6, 100):
        output.waiting.append((written, lambda written=written: woken.append(written)))  # type: ignore[misc]
    output.handle(3)
    assert woken == []
    output.handle(3)
    assert woken == [4, 6]
    output.ended()
    assert woken == [4, 6, 100]


async def test_a_mesh_knows_which_connections_are_behind(pair: tuple[socket.socket, socket.socket]) -> None:
    output, mesh = connection(pair[0]), MeshOutput()
    mesh.add(output)
    assert mesh.behind(mesh.selector.select(0)) == []
    pair[1].sendall(b"not read")
    assert mesh.behind(mesh.selector.select(0)) == [output]
    pair[0].recv(100)
    assert mesh.behind(mesh.selector.select(0)) == []
    output.reader.feed_data(b"not read")
    assert mesh.behind(mesh.selector.select(0)) == [output]
    assert mesh.remove(output)
    assert mesh.busy == {}


async def test_what_was_read_with_the_first_line_of_a_connection_is_behind(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    output, mesh = connection(pair[0]), MeshOutput()
    output.reader.feed_data(b"not handled")
    mesh.add(output)
    assert mesh.behind(mesh.selector.select(0)) == [output]
    mesh.remove(output)


async def test_nothing_more_is_expected_of_a_connection_that_is_lost(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    lost = connection(pair[0])
    pair[1].sendall(b"not read")
    lost.reader.set_exception(ConnectionResetError())
    assert lost.written() == 0
    closed = connection(pair[0])
    pair[0].close()
    assert closed.written() == 0
    assert connection(pair[0]).written() == 0


async def test_a_descriptor_that_a_lost_connection_had_serves_the_next_one(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    lost, output, mesh = connection(pair[0]), connection(pair[0]), MeshOutput()
    mesh.add(lost)
    mesh.add(output)
    pair[1].sendall(b"not read")
    assert not mesh.remove(lost)
    assert mesh.behind(mesh.selector.select(0)) == [output]
    assert mesh.remove(output)


async def test_a_connection_that_cannot_be_watched_is_not_counted(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    output, refused, mesh = connection(pair[0]), connection(pair[0]), MeshOutput()
    mesh.add(output)
    with (tmp_path / "file").open("wb") as file:  # the kernel refuses to watch it
        refused.descriptor = file.fileno()
        with pytest.raises(OSError):
            mesh.add(refused)
        assert not mesh.remove(refused)
    assert mesh.remove(output)


async def test_a_connection_that_was_closed_before_it_began_is_counted(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[0].close()
    output, mesh = connection(pair[0]), MeshOutput()
    mesh.add(output)
    assert mesh.behind(mesh.selector.select(0)) == []
    assert mesh.remove(output)


async def test_what_a_reply_says_was_written_is_waited_for_until_it_is_handled(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    output, mesh = connection(pair[0]), MeshOutput()
    mesh.add(output)
    mesh.mark(0, (9, 0))
    mesh.mark(0, (7, 0))  # of an earlier reply
    mesh.mark(1, (100, 0))  # of a rank that has not connected
    assert mesh.behind(mesh.selector.select(0)) == [output]
    assert (output.written(), output.settled) == (9, False)
    output.reader.feed_data(b"9 bytes.\n")
    output.handle(9)
    assert (output.written(), output.settled) == (9, True)
    mesh.remove(output)
    mesh.mark(0, (100, 0))
    assert mesh.busy == {}


async def test_a_mark_is_near_to_what_has_arrived_and_is_not_read_yet(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    output, mesh = connection(pair[0]), MeshOutput()
    mesh.add(output)
    pair[1].sendall(b"not read")
    output.reader.received = POSITIONS // 2 - 4  # so that what was read alone is too far from 0
    mesh.mark(0, (4 + POSITIONS // 2, 0))
    assert output.marked == POSITIONS // 2 + 4
    mesh.mark(0, (2, 0))  # modulo, after so much more
    assert output.marked == POSITIONS + 2
    mesh.remove(output)


async def test_output_that_came_too_late_is_waited_for_again_once_it_has_arrived(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    output, mesh = connection(pair[0]), MeshOutput()
    mesh.add(output)
    mesh.mark(0, (9, 0))
    mesh.miss(output)
    assert mesh.behind(mesh.selector.select(0)) == []
    mesh.mark(0, (18, 0))  # a network that delivers nothing delays one result, not each
    assert mesh.behind(mesh.selector.select(0)) == []
    assert output.written() == 0
    output.reader.feed_data(b"9 bytes.\n")
    output.handle(9)
    assert mesh.behind(mesh.selector.select(0)) == [output]
    assert output.written() == 18
    mesh.remove(output)
