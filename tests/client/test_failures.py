"""What the gateway says went wrong becomes one readable error, however many ranks it went wrong on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate.errors import (
    ActorError,
    GatewayFault,
    InvalidRequestError,
    MeshFailure,
    StaleCodeError,
    StepFailedError,
    SupervisionError,
)
from meshgate.failures import Raised, failure_of_fault, from_failure
from meshgate_wire.messages import ErrorGroup, Failure, Fault


def raised(rank: int, line: int = 10, kind: type[Exception] = ValueError) -> Raised:
    """What rank ``rank`` raised at ``line``; the message names the rank."""
    exception = kind(f"bad batch on rank {rank}")
    formatted = (
        "Traceback of where the remote call failed (most recent call last):\n"
        f'  File "/app/train.py", line {line}, in step\n'
        "    check(batch)\n"
        f"{kind.__name__}: {exception}\n"
    )
    return Raised(exception, "Actor call trainers.step failed.", formatted)


def actor_failure(groups: list[ErrorGroup], total: int, unanswered: int = 0) -> Failure:
    hosts = {rank: f"workers-{rank // 8}" for group in groups for rank in group.ranks}
    return Failure(
        kind="actor",
        message="Actor call trainers.step failed.",
        mesh="trainers",
        errors=tuple(groups),
        total=total,
        unanswered=unanswered,
        hosts=hosts,
    )


def one_each(ranks: list[int]) -> list[ErrorGroup]:
    return [ErrorGroup(ranks=(rank,), count=1, buffer=position) for position, rank in enumerate(ranks)]


def built(failure: Failure, errors: list[Raised]) -> ActorError:
    error = from_failure(failure, errors, endpoint="trainers.step")
    assert isinstance(error, ActorError)
    return error


def test_one_failed_rank_is_told_with_its_host_and_traceback() -> None:
    error = built(actor_failure(one_each([9]), total=16), [raised(9)])
    assert str(error) == (
        "trainers.step failed on rank 9 (workers-1): ValueError: bad batch on rank 9\n"
        "Traceback of where the remote call failed (most recent call last):\n"
        '  File "/app/train.py", line 10, in step\n'
        "    check(batch)\n"
        "ValueError: bad batch on rank 9"
    )
    assert (error.rank, error.ranks, error.host, error.count, error.total) == (9, (9,), "workers-1", 1, 16)
    assert (error.mesh, error.endpoint) == ("trainers", "trainers.step")
    assert isinstance(error.exception, ValueError)
    assert error.__cause__ is error.exception
    assert error.exception_formatted == raised(9).exception_formatted
    assert error.message == "Actor call trainers.step failed."


def test_a_mesh_of_one_rank_needs_no_rank_in_the_text() -> None:
    failure = actor_failure(one_each([0]), total=1).model_copy(update={"hosts": {}})
    assert str(built(failure, [raised(0)])).startswith("trainers.step failed: ValueError: bad batch on rank 0\n")


def test_many_ranks_that_fail_alike_are_told_once() -> None:
    group = ErrorGroup(ranks=tuple(range(64)), count=512, buffer=0)
    error = built(actor_failure([group], total=512), [raised(0)])
    text = str(error)
    assert text.startswith("trainers.step failed: 512 of 512 ranks failed, 1 error:\n\nranks 0-63 (workers-0, ")
    assert "5 more) and 448 more: ValueError: bad batch on rank 0\n" in text
    assert text.count("Traceback") == 1
    assert (error.rank, error.count, len(error.kinds)) == (None, 512, 1)


def test_errors_of_one_place_are_one_kind_though_their_messages_differ() -> None:
    ranks = [0, 1, 2, 3, 9, 17, 18]
    errors = [raised(rank, line=20 if rank > 16 else 10) for rank in ranks]
    error = built(actor_failure(one_each(ranks), total=512, unanswered=3), errors)
    text = str(error)
    assert text.startswith("trainers.step failed: 7 of 512 ranks failed, 2 distinct errors (3 had not answered yet):")
    alike = "(the others' messages differ in detail)\n  Traceback"
    assert f"\nranks 0-3, 9 (workers-0, workers-1): ValueError: bad batch on rank 0 {alike}" in text
    assert f"\nranks 17-18 (workers-2): ValueError: bad batch on rank 17 {alike}" in text
    assert text.count("Traceback") == 2
    assert [(kind.ranks, kind.count) for kind in error.kinds] == [((0, 1, 2, 3, 9), 5), ((17, 18), 2)]


MONARCHS_FRAME = """\
  File "/lib/python3.11/site-packages/monarch/_src/actor/actor_mesh.py", line 1822, in handle_sync
    result = the_method(*args, **kwargs)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""


def test_the_frames_in_which_monarch_calls_the_endpoint_are_left_out() -> None:
    plain = raised(0)
    head, _, rest = plain.exception_formatted.partition("\n")
    caused = "The above exception was the direct cause of the following exception:"
    formatted = f"{head}\n{rest}\n{caused}\n\n{head}\n{MONARCHS_FRAME * 2}{rest}"
    error = built(actor_failure(one_each([0]), total=1), [Raised(plain.exception, plain.message, formatted)])
    assert "handle_sync" not in str(error)
    assert str(error).endswith(f"{caused}\n\n{plain.exception_formatted.rstrip()}")
    assert error.exception_formatted == formatted, "the whole is kept"


def test_an_error_inside_monarch_is_told_with_monarchs_frames() -> None:
    formatted = f"Traceback (most recent call last):\n{MONARCHS_FRAME}TypeError: no such method\n"
    error = built(actor_failure(one_each([0]), total=1), [Raised(None, "failed", formatted)])
    assert "in handle_sync" in str(error)


def test_errors_of_one_place_and_of_two_types_are_two_kinds() -> None:
    errors = [raised(0), raised(1, kind=KeyError)]
    assert len(built(actor_failure(one_each([0, 1]), total=2), errors).kinds) == 2


def test_errors_that_were_not_sent_are_counted() -> None:
    groups = [*one_each([0]), ErrorGroup(ranks=(1,), count=1), ErrorGroup(ranks=(2,), count=1, buffer=7)]
    error = built(actor_failure(groups, total=3), [raised(0)])
    assert error.count == 3
    assert "ranks 1-2 (workers-0): their errors were too many different ones to be sent" in str(error)


def test_512_ranks_that_each_say_something_else_are_all_counted_and_one_is_told() -> None:
    """Sixteen different errors travel, and all other ranks are one group without any."""
    groups = [*one_each(list(range(16))), ErrorGroup(ranks=tuple(range(16, 80)), count=496)]
    error = built(actor_failure(groups, total=512), [raised(rank) for rank in range(16)])
    assert str(error).startswith("trainers.step failed: 512 of 512 ranks failed, 1 error or more:\n\nranks 0-15 (")
    assert "\nranks 16-79 (" in str(error)
    assert "and 432 more: their errors were too many different ones to be sent" in str(error)
    assert (error.count, error.total) == (512, 512)
    assert isinstance(error.exception, ValueError)
    assert [(kind.count, kind.sent) for kind in error.kinds] == [(16, True), (496, False)]


def test_a_failure_without_groups_is_told() -> None:
    error = built(actor_failure([], total=4), [])
    assert "Actor call trainers.step failed." in str(error)
    assert (error.exception, error.__cause__) == (None, None)


def test_an_error_that_cannot_be_read_here_is_told() -> None:
    unreadable = Raised(None, "A remote call failed, and its error cannot be read here: EOF", "")
    assert "cannot be read here: EOF" in str(built(actor_failure(one_each([0]), total=1), [unreadable]))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3)), min_size=1, max_size=40, unique_by=lambda x: x[0]))
def test_no_rank_is_lost_in_folding(failing: list[tuple[int, int]]) -> None:
    ranks = [rank for rank, _ in failing]
    errors = [raised(rank, line) for rank, line in failing]
    error = built(actor_failure(one_each(ranks), total=50), errors)
    assert error.count == len(failing)
    assert error.ranks == tuple(sorted(ranks))
    assert len(error.kinds) == len({line for _, line in failing})
    assert sorted(rank for kind in error.kinds for rank in kind.ranks) == sorted(ranks)
    assert [kind.count for kind in error.kinds] == sorted((kind.count for kind in error.kinds), reverse=True)


def test_a_death_carries_what_died() -> None:
    failure = Failure(
        kind="supervision", message="process 7 ended", mesh="trainers", ranks=(3,), hosts={3: "workers-1"}
    )
    error = from_failure(failure, endpoint="trainers.step")
    assert isinstance(error, SupervisionError)
    assert isinstance(error, RuntimeError)
    assert error.failure == MeshFailure("trainers", "process 7 ended", (3,), {3: "workers-1"})
    assert error.endpoint == "trainers.step"
    assert str(error) == ("trainers.step has no answer: rank 3 of mesh 'trainers' on workers-1 failed: process 7 ended")


def test_a_failed_step_names_the_step_and_its_cause() -> None:
    cause = ImportError("no module train")
    failure = Failure(kind="step", message="no module train", step="spawn of trainers")
    error = from_failure(failure, endpoint="trainers.step", cause=cause)
    assert isinstance(error, StepFailedError)
    assert error.step == "spawn of trainers"
    assert error.__cause__ is cause
    assert str(error) == (
        "trainers.step could not run because an earlier step failed: spawn of trainers\nno module train"
    )
    assert str(from_failure(Failure(kind="step", message="gone"))).startswith("this could not run because")


def test_a_refused_request_is_a_value_error() -> None:
    error = from_failure(Failure(kind="invalid", message="object 7 is not a mesh"))
    assert isinstance(error, InvalidRequestError)
    assert str(error) == "object 7 is not a mesh"


def test_stale_code_names_its_hosts() -> None:
    error = from_failure(Failure(kind="stale_code", message="workers-1 has not got abc", hosts={1: "workers-1"}))
    assert isinstance(error, StaleCodeError)
    assert error.hosts == ("workers-1",)


def test_the_gateways_own_fault_is_told_as_such() -> None:
    assert isinstance(from_failure(Failure(kind="internal", message="KeyError: 3")), GatewayFault)


def test_a_fault_becomes_the_failure_for_the_hook() -> None:
    fault = Fault(object=7, mesh="trainers", ranks=(1,), hosts={1: "workers-0"}, report="process 12 was killed")
    failure = failure_of_fault(fault)
    assert (failure.mesh_name, failure.ranks, failure.report()) == ("trainers", (1,), "process 12 was killed")


@pytest.mark.parametrize("endpoint", ["", "trainers.step"])
def test_every_kind_of_failure_becomes_an_error(endpoint: str) -> None:
    for kind in ("actor", "supervision", "step", "invalid", "stale_code", "internal"):
        assert "why" in str(from_failure(Failure(kind=kind, message="why"), endpoint=endpoint))
