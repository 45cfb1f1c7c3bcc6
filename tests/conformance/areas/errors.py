"""Failures of endpoints, constructors, processes, and what stays usable after them."""

from __future__ import annotations

import threading
from typing import Any

from tests.conformance.actors import Asynchronous, BadConstructor, CustomError, Worker
from tests.conformance.cases import Kit, raises


def _dies(kit: Kit, call: Any) -> Any:
    """The supervision error of ``call``, whatever its class is named in this API."""
    error = raises(Exception, call)
    names = {kind.__name__ for kind in type(error).__mro__}
    assert "SupervisionError" in names, f"{type(error).__name__}: {error}"
    return error


def an_endpoints_exception_is_an_actor_error(kit: Kit) -> None:
    actor = kit.one()
    error = raises(kit.api.ActorError, lambda: actor.fail.call_one("boom").get())
    assert isinstance(error.exception, CustomError)
    assert error.exception.code == 7
    assert "boom" in str(error)
    assert "CustomError" in str(error)


def an_async_endpoints_exception_is_an_actor_error(kit: Kit) -> None:
    actor = kit.one(Asynchronous)
    error = raises(kit.api.ActorError, lambda: actor.fail.call_one().get())
    assert isinstance(error.exception, CustomError)


def one_failing_rank_fails_the_call(kit: Kit) -> None:
    workers = kit.spawn()
    error = raises(kit.api.ActorError, lambda: workers.fail_on.call(2).get())
    assert "rank 2" in str(error)


def a_stream_reports_each_rank_for_itself(kit: Kit) -> None:
    values, errors = [], []
    for future in kit.spawn().fail_on.stream(1):
        try:
            values.append(future.get())
        except kit.api.ActorError as error:
            errors.append(error)
    assert sorted(values) == [0, 2, 3]
    assert len(errors) == 1


def the_actor_goes_on_after_an_exception(kit: Kit) -> None:
    worker = kit.one()
    raises(kit.api.ActorError, lambda: worker.fail.call_one().get())
    assert worker.add.call_one(4).get() == 4


def an_exception_is_returned_by_the_future(kit: Kit) -> None:
    future = kit.one().fail.call_one("kept")
    error = raises(kit.api.ActorError, future.get)
    assert "kept" in str(error)
    again = raises(kit.api.ActorError, future.get)
    assert "kept" in str(again)


def a_failing_constructor_fails_calls(kit: Kit) -> None:
    error = raises(Exception, lambda: kit.one(BadConstructor).echo.call_one(1).get(timeout=30))
    assert "constructor" in str(error)


def a_dead_process_fails_the_call_that_waits(kit: Kit) -> None:
    worker = kit.one()
    _dies(kit, lambda: worker.leave.call_one().get(timeout=60))


def a_dead_process_fails_later_calls(kit: Kit) -> None:
    worker = kit.one()
    _dies(kit, lambda: worker.kill_self.call_one().get(timeout=60))
    _dies(kit, lambda: worker.echo.call_one(1).get(timeout=60))


def ranks_beside_a_dead_one_stay_usable(kit: Kit) -> None:
    workers = kit.spawn()
    workers.rank.call().get()
    _dies(kit, lambda: workers.slice(hosts=1, gpus=1).leave.call_one().get(timeout=60))
    assert workers.slice(hosts=0).rank.call().get().item(gpus=1) == 1


def hosts_can_be_spawned_on_again(kit: Kit) -> None:
    worker = kit.one()
    _dies(kit, lambda: worker.leave.call_one().get(timeout=60))
    assert kit.one().echo.call_one("again").get() == "again"


def choose_on_dead_actors_fails(kit: Kit) -> None:
    workers = kit.procs(2, kit.hosts.slice(hosts=0)).spawn("workers", Worker)
    for gpu in (0, 1):
        _dies(kit, lambda gpu=gpu: workers.slice(gpus=gpu).leave.call_one().get(timeout=60))
    _dies(kit, lambda: workers.echo.choose(1).get(timeout=60))


def the_fault_hook_hears_of_a_dead_process(kit: Kit) -> None:
    import monarch.actor

    heard: list[Any] = []
    event = threading.Event()

    def hook(failure: Any) -> None:
        heard.append(failure)
        event.set()

    before = kit.api.unhandled_fault_hook
    kit.api.unhandled_fault_hook = hook
    try:
        worker = kit.one()
        worker.echo.call_one(1).get()
        worker.leave.broadcast()
        assert event.wait(60), "the hook was not called"
    finally:
        kit.api.unhandled_fault_hook = before
    assert isinstance(heard[0], monarch.actor.MeshFailure), type(heard[0])
    assert heard[0].report()


def a_stopped_mesh_refuses_calls(kit: Kit) -> None:
    worker = kit.one()
    worker.echo.call_one(1).get()
    worker.stop().get()
    raises(Exception, lambda: worker.echo.call_one(1).get(timeout=60))


def an_argument_that_cannot_be_pickled_raises_at_the_call(kit: Kit) -> None:
    worker = kit.one()
    raises(TypeError, lambda: worker.echo.call_one(threading.Lock()).get())
    assert worker.echo.call_one(1).get() == 1
