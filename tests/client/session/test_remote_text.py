from __future__ import annotations

from meshgate.serialization.unpickling import RemoteException
from meshgate.session.failures import raise_site
from meshgate.session.remote_text import readable_report, without_snapshot_paths

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
