"""Tracebacks of workers, as their reader needs them."""

from __future__ import annotations

from meshgate.failures import Raised
from meshgate.remote_text import for_people, in_project

DIGEST = "1dcf39544e3dc941e42af98050796ab551652a9398cea65b710c6dc40ef88a5f"
MONARCH = """  File "/venv/site-packages/monarch/_src/actor/actor_mesh.py", line 1822, in handle_sync
    result = the_method(*args, **kwargs)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""
OURS = """  File "/app/meshgate_gateway/engine/code_on_worker.py", line 78, in reload
    done = plan.carry_out(Actor)
  File "<_meshgate_sync_4a6634d669a0559a.reload>", line 81, in carry_out
  File "/usr/lib/python3.11/importlib/__init__.py", line 126, in import_module
    return _bootstrap._gcd_import(name[level:], package, level)
  File "<frozen importlib._bootstrap>", line 1204, in _gcd_import
"""
USERS = """  File "/home/u/.cache/meshgate/snapshots/{digest}/pkg/model.py", line 4, in <module>
    from pkg.helper import h
"""


def traceback(*frames: str, said: str = "ModuleNotFoundError: No module named 'nothere'\n") -> str:
    return "Traceback (most recent call last):\n" + "".join(frames).format(digest=DIGEST) + said


def indented(text: str) -> str:
    return "".join(f"  {line}" for line in text.splitlines(keepends=True))


SHORT = """Traceback (most recent call last):
  File "pkg/model.py", line 4, in <module>
    from pkg.helper import h
ModuleNotFoundError: No module named 'nothere'
"""


def test_a_traceback_begins_in_the_readers_code_and_names_its_files_as_the_project_does() -> None:
    assert for_people(traceback(MONARCH, OURS, USERS)) == SHORT
    assert for_people("the actor failed:\n" + indented(traceback(OURS, USERS))) == "the actor failed:\n" + indented(
        SHORT
    )


def test_what_the_readers_code_called_of_monarch_stays() -> None:
    inner = traceback(MONARCH, USERS, MONARCH)
    assert for_people(inner) == in_project(traceback(USERS, MONARCH))


def test_a_traceback_with_nothing_of_the_readers_stays_whole_unless_it_follows_another() -> None:
    alone = traceback(MONARCH)
    assert for_people(alone) == alone
    after = traceback(USERS) + "\nThe above exception was the direct cause of the following exception:\n\n"
    assert for_people(after + alone) == in_project(after) + "ModuleNotFoundError: No module named 'nothere'\n"


def test_processes_that_take_no_more_actors_are_told_with_what_to_do() -> None:
    text = "error spawning actor mesh: Failed(Cannot spawn new actors on mesh with supervision events)=0..2"
    assert for_people(text).endswith("spawn new processes")


def test_hosts_that_have_the_project_in_different_places_fail_alike() -> None:
    places = {
        Raised(None, "", traceback(f'  File "/tmp/{host}/snapshots/{{digest}}/a.py", line 1, in f\n')).place()
        for host in ("workers-0", "workers-1")
    }
    assert len(places) == 1
