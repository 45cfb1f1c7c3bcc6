"""A bounded number of the mutations of ``fuzz_frames``."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from meshgate_wire import Role, State
from tests.wire import fuzz_frames


def test_mutated_conversations_raise_wire_errors_only() -> None:
    recordings = fuzz_frames.recordings()
    states = [fuzz_frames.run_seed(seed, recordings) for seed in range(1500)]
    assert set(states) == {State.ESTABLISHED, State.ENDED, State.FAILED}


def test_no_mutation_takes_more_memory_than_the_limits_allow() -> None:
    recordings = fuzz_frames.recordings()
    tracemalloc.start()
    try:
        for seed in range(10_000, 10_100):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            fuzz_frames.run_seed(seed, recordings)
            assert tracemalloc.get_traced_memory()[1] - before < 2 * fuzz_frames.MAX_HELD, f"seed {seed}"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("role", list(Role))
def test_unchanged_conversations_are_accepted(role: Role) -> None:
    assert fuzz_frames.feed(fuzz_frames.record(role.other), role) is State.ESTABLISHED


def test_any_input_of_a_guided_fuzzer_is_accepted() -> None:
    choice = random.Random(1)
    for size in (0, 1, 2, 50, 500):
        fuzz_frames.one_input(choice.randbytes(size))
