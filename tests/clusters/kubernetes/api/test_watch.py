"""The changes of a watch are read from lines that arrive in any pieces. The response is a list of pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import urllib3
from hypothesis import given
from hypothesis import strategies as st

from meshgate_kubernetes.api.kinds import KINDS
from meshgate_kubernetes.api.watch import Watch
from meshgate_kubernetes.errors import Conflict, KubernetesError


class Response:
    """``error`` is raised once the pieces are read."""

    def __init__(self, pieces: list[bytes], error: Exception | None = None) -> None:
        self.pieces, self.error = pieces, error

    def stream(self, size: int, decode_content: bool) -> Iterator[bytes]:
        yield from self.pieces
        if self.error is not None:
            raise self.error


def line(kind: str, version: str, **facts: Any) -> bytes:
    return json.dumps({"type": kind, "object": {"metadata": {"resourceVersion": version}, **facts}}).encode() + b"\n"


def watch(*pieces: bytes, error: Exception | None = None) -> Watch:
    return Watch(Response(list(pieces), error), KINDS["Pod"])  # type: ignore[arg-type]


CHANGES = line("ADDED", "1", spec={"nodeName": "n"}) + line("BOOKMARK", "7") + line("DELETED", "9")


@given(st.lists(st.integers(0, len(CHANGES)), max_size=6))
def test_changes_arrive_whole_in_whatever_pieces(cuts: list[int]) -> None:
    ends = sorted({0, *cuts, len(CHANGES)})
    watched = watch(*(CHANGES[start:end] for start, end in pairwise(ends)))
    changes = list(watched)
    assert [(change, each["kind"], each["metadata"]["resourceVersion"]) for change, each in changes] == [
        ("ADDED", "Pod", "1"),
        ("DELETED", "Pod", "9"),
    ]
    assert changes[0][1]["spec"] == {"nodeName": "n"}


def test_a_bookmark_advances_the_version_to_continue_from() -> None:
    watched = watch(line("ADDED", "1") + line("BOOKMARK", "7"))
    next(watched)
    assert watched.resource_version == "1"
    assert list(watched) == []
    assert watched.resource_version == "7"


def test_a_version_that_is_too_old_is_a_conflict() -> None:
    with pytest.raises(Conflict, match="too old resource version"):
        next(watch(line("ERROR", "", code=410, message="too old resource version: 1 (9)")))


def test_another_failure_of_the_server_is_no_conflict() -> None:
    with pytest.raises(KubernetesError, match="the watch of pods failed: etcdserver: request timed out") as caught:
        next(watch(line("ERROR", "", code=500, message="etcdserver: request timed out")))
    assert not isinstance(caught.value, Conflict)


@pytest.mark.parametrize("error", [urllib3.exceptions.ProtocolError("broken"), OSError("reset")])
def test_a_broken_connection_ends_the_watch(error: Exception) -> None:
    assert [change for change, _ in watch(line("ADDED", "1"), b'{"type": "MODI', error=error)] == ["ADDED"]
