"""Many calls in flight, which leave the engine together, behave as if each had been sent alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshgate import (
    ActorError,
    Channel,
    MeshFailure,
    SupervisionError,
    send,
)
from tests.end_to_end.call_actors import AsyncFlown, Flown

COUNT = 200  # calls in flight
FaultsOf = Callable[..., list[MeshFailure]]


@pytest.fixture(scope="module")
def flown(procs: Any) -> Any:
    actors = procs.spawn("flown", Flown)
    fly(actors.slice(hosts=0, gpus=0))
    return actors


@pytest.fixture
def one(flown: Any) -> Iterator[Any]:
    return flown.slice(hosts=0, gpus=0)


def fly(one: Any) -> None:
    """Calls ``one`` until its process has run a batch, which depends on how the calls arrive at the engine."""
    while "meshgate-replies" not in one.threads.call_one().get():
        for future in [one.note.call_one(-1) for _ in range(COUNT)]:
            future.get()


@pytest.mark.parametrize("Class", [Flown, AsyncFlown])
def test_calls_run_once_and_in_order_and_errors_are_those_of_their_call(procs: Any, Class: type) -> None:
    one = procs.spawn("ordered", Class).slice(hosts=0, gpus=0)
    fly(one)
    before = len(one.noted.call_one().get())
    futures = [one.note.call_one(n) if n % 3 else one.fail_at.call_one(n, 2) for n in range(COUNT)]
    for number, future in enumerate(futures):
        if number % 6:
            assert future.get() == number
        else:
            with pytest.raises(ActorError, match=f"number {number}\n"):
                future.get()
    assert one.noted.call_one().get()[before:] == list(range(COUNT))


def test_each_rank_of_a_mesh_answers_each_call(flown: Any) -> None:
    meshes = [flown.note.call(number) for number in range(COUNT)]
    streams = [flown.note.stream(number) for number in range(COUNT // 10)]
    for number, mesh in enumerate(meshes):
        assert list(mesh.get().values()) == [number] * 4
    for number, stream in enumerate(streams):
        assert [future.get() for future in stream] == [number] * 4


def test_calls_to_overlapping_parts_of_a_mesh_and_broadcasts_keep_their_order(procs: Any) -> None:
    actors = procs.spawn("overlapping", Flown)
    port, _receiver = Channel.open()
    fly(actors.slice(hosts=0, gpus=0))
    before = [len(noted) for noted in actors.noted.call().get().values()]
    expected: list[list[int]] = [[], [], [], []]
    futures = []
    for number in range(COUNT):
        rank = number % 5
        if rank < 4:
            futures.append(actors.slice(hosts=rank // 2, gpus=rank % 2).note.call_one(number))
            expected[rank].append(number)
            continue
        if number % 3 == 0:
            actors.note.broadcast(number)
        elif number % 3 == 1:
            send(actors.note, (number,), {}, port)
        else:
            futures.append(actors.note.call(number))
        for each in expected:
            each.append(number)
    for future in futures:
        future.get()
    for noted, start, wanted in zip(actors.noted.call().get().values(), before, expected, strict=True):
        assert noted[start:] == wanted


def test_results_of_all_kinds_reach_their_calls(one: Any) -> None:
    for number, future in enumerate([one.value.call_one(number) for number in range(COUNT)]):
        kind = number % 5
        if kind == 3:
            with pytest.raises(ActorError, match="cannot pickle"):
                future.get()
        elif kind == 1:
            assert future.get().tolist() == [number] * 3
        else:
            expected = {0: number, 2: "x" * 200_000, 4: {"rank": {}, "message": 0}}
            assert future.get() == expected[kind]


def test_meshes_and_arrays_may_be_among_arguments_and_results(one: Any, hosts: Any) -> None:
    procs = hosts.slice(hosts=1).spawn_procs()
    futures: list[Any] = []
    for number in range(COUNT // 4):
        futures += [one.note.call_one(number), one.spawned.call_one(procs, number), one.value.call_one(5 * number)]
    for number, (note, mesh, value) in enumerate(zip(*[iter(futures)] * 3, strict=True)):
        assert (note.get(), value.get()) == (number, 5 * number)
        assert mesh.get().size() == 1
    procs.stop().get()


def test_a_long_call_holds_up_no_result_of_the_calls_before_it(one: Any, tmp_path: Path) -> None:
    for future in [one.wait_for.call_one(number, "") for number in range(COUNT)]:
        future.get()  # from here on, the endpoint is known to be short
    gate = tmp_path / "open"
    futures = [one.wait_for.call_one(number, str(gate) if number == COUNT // 2 else "") for number in range(COUNT)]
    assert [future.get(timeout=60) for future in futures[: COUNT // 2]] == list(range(COUNT // 2))
    assert not any(future.done() for future in futures[COUNT // 2 :])
    gate.touch()
    assert [future.get() for future in futures[COUNT // 2 :]] == list(range(COUNT // 2, COUNT))


def test_a_death_fails_the_calls_that_are_not_answered(hosts: Any, faults_of: FaultsOf) -> None:
    """Calls that ran may fail, too: what a process has not sent yet is lost with it, and a reply may arrive before
    those of earlier calls, which left in another message."""
    faults_of("dying")
    one = hosts.slice(hosts=1).spawn_procs().spawn("dying", Flown)
    fly(one)
    for future in [one.die_at.call_one(number, -1) for number in range(COUNT)]:
        future.get()
    futures = [one.die_at.call_one(number, COUNT // 2) for number in range(COUNT)]
    answered = {number: future.get() for number, future in enumerate(futures) if future.exception() is None}
    assert all(number == result < COUNT // 2 for number, result in answered.items())
    for number, future in enumerate(futures):
        assert number in answered or isinstance(future.exception(), SupervisionError)


def test_calls_behind_the_stop_of_an_actor_end(hosts: Any, faults_of: FaultsOf, tmp_path: Path) -> None:
    """Calls that ran may fail, too: the stop may become known before a reply that was sent before it."""
    faults_of("stopping")
    procs = hosts.slice(hosts=0).spawn_procs()
    one = procs.spawn("stopping", Flown)
    fly(one)
    futures = [one.stop_at.call_one(number, COUNT // 2, str(tmp_path / "ran")) for number in range(COUNT)]
    answered = {number for number, future in enumerate(futures) if future.exception(timeout=120) is None}
    next_call = one.note.call_one(0).exception(timeout=120)
    ran = [int(number) for number in (tmp_path / "ran").read_text().split()]
    assert ran == list(range(len(ran))), "a call has run after one that was discarded, or twice"
    assert answered <= set(ran)
    assert len(ran) > COUNT // 2
    assert next_call is not None
    procs.stop().get()


def test_peers_that_call_the_same_actor_meanwhile_are_served(procs: Any) -> None:
    actors = procs.spawn("peers", Flown)
    one, peer = actors.slice(hosts=0, gpus=0), actors.slice(hosts=1, gpus=0)
    fly(one)
    before = len(one.noted.call_one().get())
    asked = peer.call_often.call_one(one, 20, 10_000)
    own = [one.note.call_one(number) for number in range(5 * COUNT)]
    assert asked.get() == list(range(10_000, 10_020))
    assert [future.get() for future in own] == list(range(5 * COUNT))
    noted = one.noted.call_one().get()[before:]
    assert [number for number in noted if number < 10_000] == list(range(5 * COUNT))
    assert [number for number in noted if number >= 10_000] == list(range(10_000, 10_020))


def test_concurrent_endpoints_and_others_of_an_actor_all_run_once(procs: Any) -> None:
    one = procs.spawn("mixed", AsyncFlown).slice(hosts=0, gpus=1)
    fly(one)
    before = len(one.noted.call_one().get())
    calls = [one.note_later.call_one(n) if n % 4 == 0 else one.note.call_one(n) for n in range(COUNT)]
    assert [future.get() for future in calls] == list(range(COUNT))
    noted = one.noted.call_one().get()[before:]
    assert Counter(noted) == Counter(range(COUNT))
    assert [number for number in noted if number % 4] == [number for number in range(COUNT) if number % 4]
