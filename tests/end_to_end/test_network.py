"""The network between laptop and gateway is cut and frozen: each call runs once, and each line arrives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

import meshgate as kt
from meshgate.testing import NetworkProxy
from tests.end_to_end.actors import Worker
from tests.waiting import Printed

pytestmark = pytest.mark.any_release

CALLS = 400
CUTS = 40


@pytest.fixture
def proxy(job: Any) -> Iterator[NetworkProxy]:
    with NetworkProxy("127.0.0.1", urlsplit(job.gateway_url).port) as proxy:
        yield proxy


@pytest.fixture
def workers(job: Any, proxy: NetworkProxy) -> Iterator[Any]:
    client = kt.Client(kt.UrlDialer(f"ws://127.0.0.1:{proxy.port}", job._gateway.record.token))
    with client:
        yield client.attach_hosts("workers", 2).spawn_procs().spawn("workers", Worker)


def test_calls_run_once_and_in_order_through_many_cuts(workers: Any, proxy: NetworkProxy) -> None:
    worker = workers.slice(hosts=0)
    chance = random.Random(7)
    cut_at = set(chance.sample(range(CALLS), CUTS))
    futures = []
    for number in range(CALLS):
        futures.append(worker.record.call_one(number))
        if number in cut_at:
            futures[chance.randrange(len(futures))].get(timeout=60)
            proxy.cut()
    assert [future.get(timeout=60) for future in futures] == list(range(CALLS))
    assert worker.recorded.call_one().get() == list(range(CALLS))


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_cut_in_the_middle_of_an_array_loses_nothing(workers: Any, proxy: NetworkProxy, direction: Any) -> None:
    worker = workers.slice(hosts=0)
    worker.rank.call_one().get()
    array = np.random.default_rng(3).integers(0, 255, 20_000_000, dtype=np.uint8)
    proxy.cut_after(5_000_000, direction)
    np.testing.assert_array_equal(worker.echo.call_one(array).get(timeout=60), array)


def test_a_frozen_connection_resumes_when_it_thaws(workers: Any, proxy: NetworkProxy) -> None:
    worker = workers.slice(hosts=0)
    worker.rank.call_one().get()
    proxy.freeze()
    future = worker.record.call_one(1)
    with pytest.raises(TimeoutError):
        future.get(timeout=0.2)
    proxy.thaw()
    assert future.get(timeout=60) == 1


def test_output_printed_during_a_cut_arrives(workers: Any, proxy: NetworkProxy, printed: Printed) -> None:
    worker = workers.slice(hosts=0)
    for number in range(20):
        worker.say.call_one(f"line {number}").get(timeout=60)
        proxy.cut()
    worker.rank.call_one().get(timeout=60)
    while "line 19" not in printed.out:
        worker.rank.call_one().get(timeout=60)
    assert [f"line {number}" in printed.out for number in range(20)] == [True] * 20
