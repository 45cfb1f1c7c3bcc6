"""Every failure that the gateway reports becomes one readable error, on however many ranks."""

from __future__ import annotations

import sys
import traceback as traceback_module

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate.actors.api import MonarchActorError
from meshgate.errors import (
    ActorError,
    BootstrapFailed,
    ErrorKind,
    GatewayFault,
    InvalidRequestError,
    MeshFailure,
    StaleCodeError,
    StepFailedError,
    SupervisionError,
    ValueLostError,
)
from meshgate.serialization.unpickling import RemoteException
from meshgate.session.errors.failures import (
    dependency_failure,
    failure_of_fault,
    from_failure,
    headline,
    raise_site,
    readable_report,
    result_unpicklable,
    without_snapshot_paths,
)
from meshgate.session.objects import ObjectTable
from meshgate_wire.messages import ErrorGroup, Failure, Fault

DIGEST = "1dcf39544e3dc941e42af98050796ab551652a9398cea65b710c6dc40ef88a5f"
MONARCH = """  File "/venv/site-packages/monarch/_src/actor/actor_mesh.py", line 1822, in handle_sync
    result = the_method(*args, **kwargs)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""
MESHGATE = """  File "/app/meshgate_gateway/engine/code_on_worker.py", line 78, in reload
    done = plan.carry_out(Actor)
  File "<_meshgate_sync_4a6634d669a0559a.reload>", line 81, in carry_out
  File "/usr/lib/python3.11/importlib/__init__.py", line 126, in import_module
    return _bootstrap._gcd_import(name[level:], package, level)
  File "<frozen importlib._bootstrap>", line 1204, in _gcd_import
"""
USER = """  File "/home/u/.cache/meshgate/snapshots/{digest}/pkg/model.py", line 4, in <module>
    from pkg.helper import h
"""


def raised(rank: int, line: int = 10, kind: type[Exception] = ValueError) -> RemoteException:
    """The exception of rank ``rank``, raised at ``line``. Its message names the rank."""
    exception = kind(f"bad batch on rank {rank}")
    formatted = (
        "Traceback of where the remote call failed (most recent call last):\n"
        f'  File "/app/train.py", line {line}, in step\n'
        "    check(batch)\n"
        f"{kind.__name__}: {exception}\n"
    )
    return RemoteException(exception, "Actor call trainers.step failed.", formatted)


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


def build(failure: Failure, errors: list[RemoteException]) -> ActorError:
    error = from_failure(failure, errors, endpoint="trainers.step")
    assert isinstance(error, ActorError)
    return error


def test_the_error_of_one_rank_names_its_host_and_has_its_traceback() -> None:
    error = build(actor_failure(one_each([9]), total=16), [raised(9)])
    assert str(error) == (
        "Actor call trainers.step failed on rank 9 (workers-1): ValueError: bad batch on rank 9\n"
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


def test_the_error_of_a_mesh_of_one_rank_names_no_rank() -> None:
    failure = actor_failure(one_each([0]), total=1).model_copy(update={"hosts": {}})
    assert str(build(failure, [raised(0)])).startswith(
        "Actor call trainers.step failed: ValueError: bad batch on rank 0\n"
    )


def test_identical_errors_of_many_ranks_are_reported_once() -> None:
    group = ErrorGroup(ranks=tuple(range(64)), count=512, buffer=0)
    error = build(actor_failure([group], total=512), [raised(0)])
    text = str(error)
    assert text.startswith(
        "Actor call trainers.step failed: 512 of 512 ranks failed, 1 error:\n\nranks 0-63 (workers-0, "
    )
    assert "5 more) and 448 more: ValueError: bad batch on rank 0\n" in text
    assert text.count("Traceback") == 1
    assert (error.rank, error.count, len(error.kinds)) == (None, 512, 1)


def test_errors_raised_at_one_place_are_one_kind_even_if_their_messages_differ() -> None:
    ranks = [0, 1, 2, 3, 9, 17, 18]
    errors = [raised(rank, line=20 if rank > 16 else 10) for rank in ranks]
    error = build(actor_failure(one_each(ranks), total=512, unanswered=3), errors)
    text = str(error)
    assert text.startswith(
        "Actor call trainers.step failed: 7 of 512 ranks failed, 2 distinct errors (3 had not answered yet):"
    )
    alike = "(other ranks' messages differ in detail)\n  Traceback"
    assert f"\nranks 0-3, 9 (workers-0, workers-1): ValueError: bad batch on rank 0 {alike}" in text
    assert f"\nranks 17-18 (workers-2): ValueError: bad batch on rank 17 {alike}" in text
    assert text.count("Traceback") == 2
    assert [(kind.ranks, kind.count) for kind in error.kinds] == [((0, 1, 2, 3, 9), 5), ((17, 18), 2)]


def sent(rank: int) -> RemoteException:
    """The exception that rank ``rank`` sent through its response port."""
    return RemoteException(LookupError(f"sent by rank {rank}"), "", "", sent=True)


def test_an_exception_sent_through_a_response_port_is_raised_itself() -> None:
    error = from_failure(actor_failure(one_each([0]), total=1), [sent(0)], endpoint="trainers.step")
    assert type(error) is LookupError
    assert error.args == ("sent by rank 0",)


def test_of_several_sent_exceptions_that_of_the_lowest_rank_is_raised() -> None:
    ranks = [0, 7, 3, 5]
    errors = [raised(0), sent(7), sent(3), sent(5)]
    error = from_failure(actor_failure(one_each(ranks), total=8), errors, endpoint="trainers.step")
    assert error.args == ("sent by rank 3",)


MONARCHS_FRAME = """\
  File "/lib/python3.11/site-packages/monarch/_src/actor/actor_mesh.py", line 1822, in handle_sync
    result = the_method(*args, **kwargs)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""


def test_the_frames_in_which_monarch_calls_the_endpoint_are_removed() -> None:
    plain = raised(0)
    head, _, rest = plain.exception_formatted.partition("\n")
    caused = "The above exception was the direct cause of the following exception:"
    formatted = f"{head}\n{rest}\n{caused}\n\n{head}\n{MONARCHS_FRAME * 2}{rest}"
    error = build(actor_failure(one_each([0]), total=1), [RemoteException(plain.exception, plain.message, formatted)])
    assert "handle_sync" not in str(error)
    assert str(error).endswith(f"{caused}\n\n{plain.exception_formatted.rstrip()}")
    assert error.exception_formatted == formatted, "the attribute keeps the full traceback"


def test_an_error_inside_monarch_keeps_monarchs_frames() -> None:
    formatted = f"Traceback (most recent call last):\n{MONARCHS_FRAME}TypeError: no such method\n"
    error = build(actor_failure(one_each([0]), total=1), [RemoteException(None, "failed", formatted)])
    assert "in handle_sync" in str(error)


def test_errors_of_two_types_raised_at_one_place_are_two_kinds() -> None:
    errors = [raised(0), raised(1, kind=KeyError)]
    assert len(build(actor_failure(one_each([0, 1]), total=2), errors).kinds) == 2


def test_errors_that_were_not_sent_are_counted() -> None:
    groups = [*one_each([0]), ErrorGroup(ranks=(1,), count=1), ErrorGroup(ranks=(2,), count=1, buffer=7)]
    error = build(actor_failure(groups, total=3), [raised(0)])
    assert error.count == 3
    assert "ranks 1-2 (workers-0): too many distinct errors; these were not sent" in str(error)


def test_512_distinct_errors_are_all_counted_and_one_is_shown() -> None:
    """The gateway sends sixteen distinct errors and groups all other ranks."""
    groups = [*one_each(list(range(16))), ErrorGroup(ranks=tuple(range(16, 80)), count=496)]
    error = build(actor_failure(groups, total=512), [raised(rank) for rank in range(16)])
    assert str(error).startswith(
        "Actor call trainers.step failed: 512 of 512 ranks failed, 1 error or more:\n\nranks 0-15 ("
    )
    assert "\nranks 16-79 (" in str(error)
    assert "and 432 more: too many distinct errors; these were not sent" in str(error)
    assert (error.count, error.total) == (512, 512)
    assert isinstance(error.exception, ValueError)
    assert [(kind.count, kind.sent) for kind in error.kinds] == [(16, True), (496, False)]


def test_a_failure_without_groups_shows_its_message() -> None:
    error = build(actor_failure([], total=4), [])
    assert "Actor call trainers.step failed." in str(error)
    assert (error.exception, error.__cause__) == (None, None)


def test_an_error_that_cannot_be_unpickled_shows_the_reason() -> None:
    unreadable = RemoteException(None, "A remote call failed, and its exception cannot be unpickled: EOF", "")
    assert "cannot be unpickled: EOF" in str(build(actor_failure(one_each([0]), total=1), [unreadable]))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3)), min_size=1, max_size=40, unique_by=lambda x: x[0]))
def test_grouping_loses_no_rank(failing: list[tuple[int, int]]) -> None:
    ranks = [rank for rank, _ in failing]
    errors = [raised(rank, line) for rank, line in failing]
    error = build(actor_failure(one_each(ranks), total=50), errors)
    assert error.count == len(failing)
    assert error.ranks == tuple(sorted(ranks))
    assert len(error.kinds) == len({line for _, line in failing})
    assert sorted(rank for kind in error.kinds for rank in kind.ranks) == sorted(ranks)
    assert [kind.count for kind in error.kinds] == sorted((kind.count for kind in error.kinds), reverse=True)


def test_a_supervision_error_carries_the_mesh_failure() -> None:
    failure = Failure(
        kind="supervision", message="process 7 ended", mesh="trainers", ranks=(3,), hosts={3: "workers-1"}
    )
    error = from_failure(failure, endpoint="trainers.step")
    assert isinstance(error, SupervisionError)
    assert isinstance(error, RuntimeError)
    assert error.failure == MeshFailure("trainers", "process 7 ended", (3,), {3: "workers-1"})
    assert error.endpoint == "trainers.step"
    assert str(error) == (
        "Endpoint call trainers.step() failed, process 7 ended\n  Failed: rank 3 of mesh 'trainers' on workers-1"
    )
    assert str(from_failure(failure, endpoint="trainers.put()")).startswith("Endpoint call trainers.put() failed")


def test_an_operation_on_a_mesh_is_not_called_an_endpoint() -> None:
    failure = Failure(kind="supervision", message="process 7 ended", mesh="trainers", ranks=(3,))
    assert str(from_failure(failure, endpoint="trainers.initialized")) == (
        "trainers.initialized failed: rank 3 of mesh 'trainers' failed: process 7 ended"
    )


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


def test_a_rejected_request_is_a_value_error() -> None:
    error = from_failure(Failure(kind="invalid", message="object 7 is not a mesh"))
    assert isinstance(error, InvalidRequestError)
    assert str(error) == "object 7 is not a mesh"


def test_stale_code_names_its_hosts() -> None:
    error = from_failure(Failure(kind="stale_code", message="workers-1 does not have abc", hosts={1: "workers-1"}))
    assert isinstance(error, StaleCodeError)
    assert error.hosts == ("workers-1",)


def test_an_internal_failure_is_a_gateway_fault() -> None:
    assert isinstance(from_failure(Failure(kind="internal", message="KeyError: 3")), GatewayFault)


def test_a_fault_becomes_the_hooks_mesh_failure() -> None:
    fault = Fault(object=7, mesh="trainers", ranks=(1,), hosts={1: "workers-0"}, report="process 12 was killed")
    failure = failure_of_fault(fault)
    assert (failure.mesh_name, failure.ranks, failure.report()) == ("trainers", (1,), "process 12 was killed")
    assert not failure.job_lost
    assert failure_of_fault(fault.model_copy(update={"job_lost": True})).job_lost


@pytest.mark.parametrize("endpoint", ["", "trainers.step"])
def test_every_kind_of_failure_becomes_an_error(endpoint: str) -> None:
    for kind in ("actor", "supervision", "step", "invalid", "stale_code", "internal"):
        assert "why" in str(from_failure(Failure(kind=kind, message="why"), endpoint=endpoint))


DIED = Failure(kind="supervision", message="no memory")


def test_a_call_on_a_descendant_of_a_failed_object_names_the_failed_step() -> None:
    objects = ObjectTable()
    procs = objects.create("procs", "trainers", "spawn_procs")
    actors = objects.create("actors", "counters", "spawn", (procs.number,))
    objects.fail(procs.number, DIED)
    error = dependency_failure(objects, actors.number, "counters.add")()
    assert isinstance(error, StepFailedError)
    assert error.step == "spawn_procs"
    assert isinstance(error.__cause__, SupervisionError)


def test_a_call_on_a_stopped_object_fails_with_the_stop_itself() -> None:
    objects = ObjectTable()
    procs = objects.create("procs", "trainers", "spawn_procs")
    objects.stop(procs.number, "by the user")
    error = dependency_failure(objects, procs.number, "trainers.initialized")()
    assert isinstance(error, SupervisionError)
    assert "procs mesh 'trainers' was stopped: by the user" in str(error)


def test_values_of_processes_that_the_program_has_stopped_are_lost() -> None:
    objects = ObjectTable()
    procs = objects.create("procs", "trainers", "spawn_procs")
    kept = objects.create("kept", "trainers.step.keep()", "keep", (procs.number,))
    objects.stop(procs.number, "by the user")
    error = dependency_failure(objects, kept.number, "counters.add")()
    assert isinstance(error, ValueLostError)
    assert error.call == "trainers.step.keep()"
    assert str(error).startswith(
        "counters.add could not run: the values of trainers.step.keep() are lost, because the process ended: procs "
        "mesh 'trainers' was stopped: by the user\nCall keep() or put() again"
    )


def test_a_creation_that_takes_a_failed_value_says_where_the_exception_is() -> None:
    groups = (ErrorGroup(ranks=(1,), count=1, buffer=0),)
    failure = Failure(kind="actor", message="failed", step="makers.make.keep()", errors=groups, total=2)
    error = from_failure(failure, endpoint="takers.take")
    assert str(error) == (
        "takers.take could not run, because the call whose result it takes failed.\n"
        "Actor call makers.make.keep() failed on rank 1: get() of its kept mesh raises the exception"
    )


TRACEBACK = """\
Traceback of where the remote call failed (most recent call last):
  File "/app/train.py", line 3, in set_up
    raise ValueError("no device")
ValueError: no device
"""


def test_processes_whose_bootstrap_raised_fail_with_an_actor_error_and_what_is_spawned_on_them_with_the_step() -> None:
    objects = ObjectTable()
    procs = objects.create("procs", "trainers", "spawn_procs({'gpus': 2})")
    actors = objects.create("actors", "counters", "spawn", (procs.number,))
    objects.fail(procs.number, Failure(kind="actor", message=TRACEBACK, mesh="trainers", step=procs.step))
    error = dependency_failure(objects, procs.number, "trainers.initialized")()
    assert isinstance(error, ActorError)
    assert str(error) == f"trainers.initialized failed: ValueError: no device\n{TRACEBACK.rstrip()}"
    assert (error.message, error.exception_formatted) == ("ValueError: no device", TRACEBACK)
    dependent = dependency_failure(objects, actors.number, "counters.add")()
    assert isinstance(dependent, BootstrapFailed)
    assert dependent.step == "spawn_procs({'gpus': 2})"
    assert isinstance(dependent.__cause__, ActorError)
    assert str(dependent.__cause__) == f"trainers failed: ValueError: no device\n{TRACEBACK.rstrip()}"
    assert (dependent.message, dependent.exception_formatted) == ("ValueError: no device", TRACEBACK)
    with pytest.raises(MonarchActorError):
        raise dependent
    assert str(dependent).startswith("counters.add could not run because an earlier step failed: spawn_procs(")
    assert "ValueError: no device" in str(dependent)


def test_a_call_on_a_released_object_fails_with_the_given_reason() -> None:
    error = dependency_failure(ObjectTable(), 7, "counters.add", DIED)()
    assert isinstance(error, StepFailedError)
    assert "no memory" in str(error)


def test_each_caller_gets_a_dependency_error_of_its_own() -> None:
    make_error = dependency_failure(ObjectTable(), 7, "counters.add", DIED)
    assert make_error() is not make_error()


def test_a_missing_module_comes_with_how_to_add_it_to_the_image() -> None:
    missing = ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")
    failure = actor_failure(one_each([0]), total=1)
    error = build(
        failure, [RemoteException(missing, "m", "Traceback\nModuleNotFoundError: No module named 'torch.nn'")]
    )
    assert "Image().pip_install(['torch'])" in str(error)
    assert "another image, Compute(image=…)" in str(error)
    assert "pip_install" not in str(build(failure, [raised(0)]))


def test_a_module_missing_in_a_job_on_this_machine_comes_with_the_command_that_installs_it() -> None:
    missing = ModuleNotFoundError("No module named 'torch'", name="torch")
    remote = RemoteException(missing, "m", "Traceback\nModuleNotFoundError: No module named 'torch'")
    error = from_failure(actor_failure(one_each([0]), total=1), [remote], shared_environment="/home/me/venv")
    assert str(error).endswith(
        "\nThe workers cannot import 'torch'. They run the Python of this program: if it is a package, install it in "
        "/home/me/venv, pip install torch. If it is a module of your project, it must be synced (docs/code.md)."
    )


def test_a_result_that_cannot_be_pickled_is_named_as_the_result() -> None:
    frame = (
        '  File "/venv/site-packages/cloudpickle/cloudpickle.py", line 1313, in dump\n    return super().dump(obj)\n'
    )
    text = f"Traceback (most recent call last):\n{frame}TypeError: cannot pickle 'generator' object\n"
    failed = build(actor_failure(one_each([0]), total=1), [RemoteException(None, "m", text)])
    assert "returned a value that cannot be pickled" in str(failed)


def traceback(*frames: str, last_line: str = "ModuleNotFoundError: No module named 'nothere'\n") -> str:
    return "Traceback (most recent call last):\n" + "".join(frames).format(digest=DIGEST) + last_line


def indented(text: str) -> str:
    return "".join(f"  {line}" for line in text.splitlines(keepends=True))


SHORT = """Traceback (most recent call last):
  File "pkg/model.py", line 4, in <module>
    from pkg.helper import h
ModuleNotFoundError: No module named 'nothere'
"""


def test_a_traceback_starts_in_the_users_code_with_project_paths() -> None:
    assert readable_report(traceback(MONARCH, MESHGATE, USER)) == SHORT
    report = "the actor failed:\n" + indented(traceback(MESHGATE, USER))
    assert readable_report(report) == "the actor failed:\n" + indented(SHORT)


def test_inner_frames_of_monarch_are_kept() -> None:
    inner = traceback(MONARCH, USER, MONARCH)
    assert readable_report(inner) == without_snapshot_paths(traceback(USER, MONARCH))


def test_a_traceback_without_user_frames_is_kept_unless_it_follows_another() -> None:
    alone = traceback(MONARCH)
    assert readable_report(alone) == alone
    after = traceback(USER) + "\nThe above exception was the direct cause of the following exception:\n\n"
    last_line = "ModuleNotFoundError: No module named 'nothere'\n"
    assert readable_report(after + alone) == without_snapshot_paths(after) + last_line


def test_poisoned_processes_come_with_a_hint() -> None:
    text = "error spawning actor mesh: Failed(Cannot spawn new actors on mesh with supervision events)=0..2"
    assert readable_report(text).endswith("spawn new processes")


def test_snapshot_paths_do_not_distinguish_errors() -> None:
    places = {
        raise_site(
            RemoteException(None, "", traceback(f'  File "/tmp/{host}/snapshots/{{digest}}/a.py", line 1, in f\n'))
        )
        for host in ("workers-0", "workers-1")
    }
    assert len(places) == 1


class TestHeadline:
    def test_it_is_the_first_line_of_a_message_of_several(self) -> None:
        assert headline(kind_of(formatted(ValueError("first\nsecond\n  third")))) == "ValueError: first"

    def test_it_is_that_of_the_last_exception_of_a_chain(self) -> None:
        error = ValueError("b")
        error.__cause__ = KeyError("a")
        assert headline(kind_of(formatted(error))) == "ValueError: b"

    @pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are new in Python 3.11")
    def test_it_is_that_of_an_exception_group_itself(self) -> None:
        inner = ValueError("inner")
        try:
            raise inner
        except ValueError:
            group = ExceptionGroup("many", [inner, KeyError("b")])  # type: ignore[name-defined, unused-ignore]  # noqa: F821
        assert headline(kind_of(formatted(group))) == "ExceptionGroup: many (2 sub-exceptions)"

    def test_a_text_without_frames_is_its_own_first_line(self) -> None:
        assert headline(kind_of("ValueError: a\nb")) == "ValueError: a"
        assert headline(kind_of("Traceback\nModuleNotFoundError: a")) == "ModuleNotFoundError: a"
        assert headline(kind_of("")) == "the message"


def kind_of(formatted: str) -> ErrorKind:
    return ErrorKind((0,), 1, None, "the message", formatted)


def formatted(error: Exception) -> str:
    with pytest.raises(type(error)) as raised:
        raise error
    return "".join(traceback_module.format_exception(raised.value))


def test_an_exception_group_starts_in_the_users_code() -> None:
    group = "".join(
        f"  | {line}" for line in (MONARCH + USER.format(digest=DIGEST) + "ExceptionGroup: many\n").splitlines(True)
    )
    head = "  + Exception Group Traceback (most recent call last):\n"
    assert readable_report(head + group) == head + (
        '  |   File "pkg/model.py", line 4, in <module>\n  |     from pkg.helper import h\n  | ExceptionGroup: many\n'
    )


def test_a_result_that_cannot_be_pickled_is_not_an_endpoint_that_fails_to_pickle() -> None:
    frame = (
        '  File "/venv/site-packages/cloudpickle/cloudpickle.py", line 1313, in dump\n    return super().dump(obj)\n'
    )
    last_line = "TypeError: cannot pickle 'generator' object\n"
    assert result_unpicklable(readable_report(traceback(MONARCH, frame, last_line=last_line)))
    assert not result_unpicklable(readable_report(traceback(MONARCH, USER, frame, last_line=last_line)))
