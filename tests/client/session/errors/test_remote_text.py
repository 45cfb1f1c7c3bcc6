from __future__ import annotations

import sys
import traceback as traceback_module

import pytest

from meshgate.serialization.unpickling import RemoteException
from meshgate.session.errors.failures import raise_site
from meshgate.session.errors.remote_text import (
    exception_line,
    readable_report,
    result_unpicklable,
    without_snapshot_paths,
)

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


class TestExceptionLine:
    def test_it_is_the_first_line_of_a_message_of_several(self) -> None:
        assert exception_line(formatted(ValueError("first\nsecond\n  third"))) == "ValueError: first"

    def test_it_is_that_of_the_last_exception_of_a_chain(self) -> None:
        error = ValueError("b")
        error.__cause__ = KeyError("a")
        assert exception_line(formatted(error)) == "ValueError: b"

    @pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are new in Python 3.11")
    def test_it_is_that_of_an_exception_group_itself(self) -> None:
        inner = ValueError("inner")
        try:
            raise inner
        except ValueError:
            group = ExceptionGroup("many", [inner, KeyError("b")])  # type: ignore[name-defined, unused-ignore]  # noqa: F821
        assert exception_line(formatted(group)) == "ExceptionGroup: many (2 sub-exceptions)"

    def test_a_text_without_frames_is_its_own_first_line(self) -> None:
        assert exception_line("ValueError: a\nb") == "ValueError: a"
        assert exception_line("") == ""


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
