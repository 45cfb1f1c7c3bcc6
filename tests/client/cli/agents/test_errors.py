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


SNAPSHOT = "/home/u/.cache/meshgate/snapshots/" + 64 * "0"
ON_RANK = """Traceback of where the remote call failed (most recent call last):
  File "/venv/site-packages/monarch/_src/actor/actor_mesh.py", line 1822, in handle_sync
    result = the_method(*args, **kwargs)
  File "{where}pkg/model.py", line 4, in step
    return x / 0
ZeroDivisionError: division by zero
"""


def test_a_group_has_the_exception_and_its_traceback_from_the_users_code_on() -> None:
    error = ActorError(None)
    text = ON_RANK.format(where=f"{SNAPSHOT}/")
    error.kinds = (ErrorKind((0,), 1, None, "Actor call trainers.step failed.", text),)
    (group,) = error_report(error).groups
    assert group.message == "ZeroDivisionError: division by zero"
    head, _, _, *rest = ON_RANK.format(where="").splitlines(keepends=True)
    assert group.traceback == "".join((head, *rest))


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
