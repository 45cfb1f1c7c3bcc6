"""What happened between two looks at a job."""

from __future__ import annotations

from meshgate.cli.top.rates import compare
from meshgate.ranks.usage.meter import Gpu, Usage
from meshgate_wire.status import CallCounts
from tests.client.cli.top.looks import GIB, process, status, top


def test_rates_are_what_happened_between_two_looks() -> None:
    (call,) = top().calls
    assert (call.mesh, call.ranks, call.ended, call.failed, call.casts) == ("trainers", 2, 20, 4, 8)
    assert (call.rate, call.latency, call.in_flight, call.oldest) == (7.0, 0.025, 3, 3.0)


def test_a_mesh_that_is_new_counts_from_its_spawn_and_an_older_gateway_reports_none() -> None:
    (new,) = compare(status(None), status(CallCounts(ended=4, seconds=1.0)), 2.0, Usage()).calls
    assert (new.rate, new.latency) == (2.0, 0.25)
    (old,) = compare(status(None), status(None), 2.0, Usage()).calls
    assert (old.rate, old.latency) == (0.0, None)


def test_gpus_of_a_rank_are_averaged_and_its_own_memory_is_preferred() -> None:
    gpus = [Gpu("workers-0", 0, 20, GIB, 8 * GIB), Gpu("workers-0", 1, 60, GIB, 8 * GIB)]
    gpus.append(Gpu("workers-1", 0, 99, GIB, 8 * GIB))
    usage = Usage([process(0, gpus=(0, 1)), process(1, gpus=(0,), gpu_memory=5), process(2)], gpus)
    ranks = compare(status(None), status(None), 1.0, usage).ranks
    assert [(rank.gpu, rank.gpu_memory) for rank in ranks] == [(40, 2 * GIB), (99, 5), (None, None)]
