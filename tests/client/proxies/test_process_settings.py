"""The processes of a mesh become the ranks of one group."""

from __future__ import annotations

from typing import Any

import pytest

from meshgate.proxies.process_settings import set_up_ranks
from meshgate.session.futures import FutureProxy
from meshgate.shapes.shape import Extent


class Endpoint:
    def __init__(self, result: Any) -> None:
        self.result, self.calls = result, []  # type: ignore[var-annotated]

    def call(self, *arguments: Any) -> FutureProxy[Any]:
        self.calls.append(arguments)
        return FutureProxy.resolved(self.result)

    call_one = call


class Actors:
    """A mesh whose slices are itself."""

    def __init__(self, extent: Extent, held: tuple[str, int, str]) -> None:
        self.extent, self.sliced = extent, {}  # type: ignore[var-annotated]
        self.hold_port, self.set_up = Endpoint(held), Endpoint(None)

    def __len__(self) -> int:
        return self.extent.nelements

    def slice(self, **coordinates: int) -> Actors:
        self.sliced = coordinates
        return self


@pytest.mark.parametrize(
    ("extent", "hosts", "local_world"),
    [
        (Extent(("hosts", "gpus"), (2, 4)), 2, 4),
        (Extent(("hosts",), (3,)), 3, 1),
        (Extent(("gpus",), (4,)), 1, 4),
        (Extent(("hosts", "trainers", "gpus"), (2, 3, 2)), 2, 6),
    ],
)
def test_all_ranks_meet_at_the_port_that_rank_0_holds(extent: Extent, hosts: int, local_world: int) -> None:
    actors = Actors(extent, ("10.0.0.1", 4000, ""))
    set_up_ranks(actors, None, 0)
    assert actors.sliced == dict.fromkeys(extent.labels, 0)
    assert actors.hold_port.calls == [(None, 0, hosts)]
    assert actors.set_up.calls == [(len(actors), local_world, ("10.0.0.1", 4000))]


def test_a_port_that_cannot_be_held_is_an_error_and_nothing_is_set() -> None:
    actors = Actors(Extent(("hosts",), (1,)), ("", 0, "port 80 cannot be used"))
    with pytest.raises(ValueError, match=r"setup_torch\(\): port 80 cannot be used"):
        set_up_ranks(actors, None, 80)
    assert actors.set_up.calls == []
