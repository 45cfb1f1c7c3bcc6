from __future__ import annotations

import pytest

from meshgate_wire import Limits
from meshgate_wire.frames import PeerLimits
from meshgate_wire.limits import LEAST


@pytest.mark.parametrize("name", list(LEAST))
def test_no_limit_undercuts_what_every_peer_may_count_on(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"Limits\.{name} is {LEAST[name] - 1}, every peer may count on {LEAST[name]}"
    ):
        Limits(**{name: LEAST[name] - 1})


def test_the_least_limits_agree_with_each_other() -> None:
    limits = Limits(**LEAST)
    assert PeerLimits.of(limits).model_dump() == LEAST


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"window": 2**31}, "the most is 2147483647"),
        ({"max_frame": 2**22}, "must exceed max_frame"),
        ({"max_message": 2**34}, "must hold one message"),
        ({"chunk": 100}, "at least 1024"),
        ({"chunk": 2**27}, "at most 64 MiB"),
        ({"small_message": 65537}, "the most is 65536"),
        ({"max_unacknowledged": -1}, "max_unacknowledged is negative"),
    ],
)
def test_limits_that_cannot_work_are_refused(wrong: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Limits(**wrong)
