"""meshgate's own actors run on workers without meshgate."""

from __future__ import annotations

import importlib
import linecache
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import meshgate
from meshgate.images.on_host import StepRunner
from meshgate.jobs.spmd.rank_actors import RankRunner, RankStopper
from meshgate.proxies.process_settings import LogLevel, TorchEnvironment
from meshgate.ranks.on_host import StreamWriter
from meshgate.serialization.pickling import dump_class, pickled_by_value
from meshgate.serialization.sent_as_source import INCLUDE_COMMENT, REQUIRED_IMPORT, SentAsSource
from meshgate.transfer.on_host import FileReader

WORKER = """
import pickle, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("meshgate"):
            raise ImportError(name)

sys.meta_path.insert(0, Block())
data = sys.stdin.buffer.read()
first, second = pickle.loads(data), pickle.loads(data)
from monarch.actor import Actor
print(first.__name__, issubclass(first, Actor), first is second)
"""


@pytest.mark.parametrize(
    "Class", [StepRunner, FileReader, RankRunner, RankStopper, StreamWriter, TorchEnvironment, LogLevel]
)
def test_a_worker_without_meshgate_builds_the_class_from_source(Class: type) -> None:
    data = dump_class(Class, by_value=pickled_by_value(Class))
    done = subprocess.run([sys.executable, "-c", WORKER], input=data, capture_output=True, check=True)
    assert done.stdout.decode().split() == [Class.__name__, "True", "True"]


THREADS = """
import pickle, sys, threading

data = sys.stdin.buffer.read()
runner, stopper = pickle.loads(data)
found, start = [], threading.Barrier(8)

def load(part):
    start.wait()
    found.append(pickle.loads(part).__name__)

threads = [threading.Thread(target=load, args=(part,)) for part in (runner, stopper) * 4]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(found), len([name for name in sys.modules if name.startswith("meshgate_jobs_spmd")]))
"""


def test_actors_of_one_module_may_be_loaded_at_the_same_time() -> None:
    classes = [dump_class(Class, by_value=True) for Class in (RankRunner, RankStopper)]
    done = subprocess.run([sys.executable, "-c", THREADS], input=pickle.dumps(classes), capture_output=True, check=True)
    assert done.stdout.decode().split() == ["8", "1"], done.stderr.decode()


def test_a_module_without_the_required_import_is_rejected() -> None:
    Wrong = SentAsSource("Wrong", (), {"__module__": __name__})
    with pytest.raises(TypeError, match="does not contain the line"):
        pickle.dumps(Wrong)


def sender(monkeypatch: pytest.MonkeyPatch, imports: str) -> SentAsSource:
    """A class of a module with these imports."""
    text = f"{REQUIRED_IMPORT}{imports}\nclass Sent(Actor, metaclass=SentAsSource):\n    pass\n"
    module = ModuleType("sending")
    module.__file__ = "<sending>"
    monkeypatch.setitem(sys.modules, "sending", module)
    monkeypatch.setitem(linecache.cache, "<sending>", (len(text), None, text.splitlines(True), "<sending>"))
    exec(compile(text, "<sending>", "exec"), vars(module))
    return module.Sent  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("imports", "name"),
    [
        (f"from meshgate.ranks.processes import (\n    siblings,{INCLUDE_COMMENT}\n)\n", "meshgate.ranks.processes"),
        ("from meshgate.ranks.processes import siblings\n", "meshgate.ranks.processes"),
        ("import os, rich.console\n", "rich.console"),
        ("def late():\n    import meshgate.errors\n", "meshgate.errors"),
        (f"from meshgate.ranks.exec import MAX_LINE{INCLUDE_COMMENT}\n", "meshgate"),  # that imports others
    ],
)
def test_an_import_that_hosts_may_not_have_is_refused_before_anything_is_sent(
    imports: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TypeError, match=rf"cannot send sending: .* imports {name}\b.* on one line"):
        pickle.dumps(sender(monkeypatch, imports))


def test_imports_that_hosts_have_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = "import os.path\nfrom collections.abc import Mapping\ndef late():\n    import monarch.actor\n"
    pickle.dumps(sender(monkeypatch, f"{imports}from meshgate.ranks.processes import siblings{INCLUDE_COMMENT}\n"))


def test_every_module_that_is_sent_can_be_sent() -> None:
    top = Path(meshgate.__file__).parent
    sending = [path for path in top.rglob("*.py") if REQUIRED_IMPORT in path.read_text().splitlines(keepends=True)]
    assert len(sending) >= 9
    for path in sending:
        module = importlib.import_module(".".join(("meshgate", *path.relative_to(top).with_suffix("").parts)))
        for value in list(vars(module).values()):
            if isinstance(value, SentAsSource) and value.__module__ == module.__name__:
                pickle.dumps(value)
