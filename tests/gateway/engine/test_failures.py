from __future__ import annotations

import asyncio
import logging

import pytest

from meshgate_gateway.engine.failures import FailureReports, failure_of, invalid, stale_code
from meshgate_gateway.engine.monarch.interface import BootstrapFailed
from meshgate_wire.messages import (
    AttachHosts,
    Call,
    Configure,
    EndSession,
    Failed,
    Failure,
    Header,
    MeshRef,
    ObjectFailed,
    stream_of,
)
from tests.gateway.engine.fakes import Sent

CALL = Call(call=1, target=MeshRef(object=3), endpoint="step", adverb="call")
ATTACH = AttachHosts(object=1, mesh="workers")


class Panic(BaseException):
    """As pyo3's PanicException."""


def reported(header: Header, error: BaseException) -> tuple[Sent, dict[int, Failure]]:
    sent, defined = Sent(), dict[int, Failure]()
    FailureReports(defined.__setitem__, sent).report(header, error)
    return sent, defined


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (invalid("object 7 is not a port"), "invalid", "object 7 is not a port"),
        (stale_code("workers-1 is behind", ["workers-1"]), "stale_code", "workers-1 is behind"),
        (RuntimeError("died\n\nStack backtrace:\n 0: rust"), "supervision", "died"),
        (BootstrapFailed("Traceback: no device"), "actor", "Traceback: no device"),
        (ValueError("bad slice"), "invalid", "bad slice"),
        (OSError("no space left"), "invalid", "no space left"),
        (KeyError("gone"), "internal", "KeyError: 'gone'"),
        (Panic("rust panicked"), "internal", "Panic: rust panicked"),
    ],
)
def test_the_client_sees_what_kind_of_error_it_is(error: BaseException, kind: str, message: str) -> None:
    failure = failure_of(error)
    assert (failure.kind, failure.message) == (kind, message)


def test_a_failed_call_is_answered_on_the_stream_of_its_target() -> None:
    sent, defined = reported(CALL, ValueError("bad slice"))
    ((header, stream, _),) = sent.messages
    assert isinstance(header, Failed)
    assert (header.call, stream, defined) == (1, stream_of(3), {})
    sent, _ = reported(EndSession(call=2), ValueError("bad"))
    assert sent.messages[0][1] == 0


def test_a_failed_creation_replaces_the_object_by_its_failure() -> None:
    sent, defined = reported(ATTACH, ValueError("no such mesh"))
    assert sent.of(ObjectFailed) == [ObjectFailed(object=1, failure=defined[1])]
    assert defined[1].message == "no such mesh"


def test_the_failure_of_a_message_without_an_answer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    sent, _ = reported(Configure(), invalid("out of range"))
    assert sent.messages == []
    assert "Configure failed: out of range" in caplog.text


def test_an_internal_error_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    reported(CALL, KeyError("gone"))
    assert caplog.records[0].exc_info is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), asyncio.CancelledError()])
def test_what_ends_the_process_or_the_task_is_raised_again(error: BaseException) -> None:
    with pytest.raises(type(error)):
        reported(CALL, error)


def test_guarded_work_that_panics_is_answered() -> None:
    sent = Sent()

    async def work() -> None:
        raise Panic("rust panicked")

    asyncio.run(FailureReports(lambda number, failure: None, sent).guard(CALL, work()))
    assert sent.of(Failed)[0].failure.message == "Panic: rust panicked"
