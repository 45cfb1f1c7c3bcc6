from __future__ import annotations

from meshgate import ActorError
from meshgate.cli.agents.errors import error_report
from meshgate.errors import ErrorKind


def test_an_exception_is_its_type_message_and_traceback() -> None:
    try:
        raise ValueError("wrong")
    except ValueError as error:
        report = error_report(error)
    assert (report.type, report.message, report.groups) == ("ValueError", "wrong", [])
    assert "test_errors.py" in report.traceback
    assert error_report(ValueError("not raised")).traceback == ""


def test_a_failed_call_is_what_its_ranks_raised() -> None:
    error = ActorError(None)
    error.endpoint = "trainers.step"
    error.kinds = (
        ErrorKind((0, 2), 2, KeyError("a"), "KeyError: 'a'", "Traceback of a"),
        ErrorKind((1,), 1, None, "OSError: b", "Traceback of b"),
    )
    report = error_report(error)
    assert (report.type, report.message, report.endpoint) == ("KeyError", "'a'", "trainers.step")
    assert [(group.ranks, group.count, group.traceback) for group in report.groups] == [
        ([0, 2], 2, "Traceback of a"),
        ([1], 1, "Traceback of b"),
    ]
    error.kinds = ()
    assert error_report(error).type == "ActorError"
