"""The start of the peer Ray, with a Ray of the test's: the node gives up at its first start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers.ray_client import cluster

NODE = """#!{python}
import socket, sys, time
with open({starts!r}, "a+") as starts:
    starts.write("a start\\n")
    starts.seek(0)
    if len(starts.readlines()) <= {failures}:
        sys.exit("The current node timed out during startup.")
(port,) = (option.split("=")[1] for option in sys.argv if option.startswith("--ray-client-server-port="))
with socket.create_server(("127.0.0.1", int(port))):
    time.sleep(1000)
"""


def python_with_ray(directory: Path, failures: int) -> str:
    """A Python whose Ray gives up so many times before it starts, and accepts every client."""
    node = NODE.format(python=sys.executable, starts=str(directory / "starts"), failures=failures)
    for name, text in (("ray", node), ("python", "#!/bin/sh\n")):
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    return str(directory / "python")


def test_a_node_that_gives_up_is_started_again(tmp_path: Path) -> None:
    with cluster(python_with_ray(tmp_path, failures=2), tmp_path / "log") as address:
        assert address.startswith("127.0.0.1:")
    assert (tmp_path / "starts").read_text() == "a start\n" * 3


def test_the_words_of_a_node_that_never_starts_are_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"in \d attempts:\nThe current node timed out"):
        cluster(python_with_ray(tmp_path, failures=100), tmp_path / "log").__enter__()
