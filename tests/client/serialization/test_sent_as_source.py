"""meshgate's own actors run on workers without meshgate."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from meshgate.images.on_host import StepRunner
from meshgate.jobs.spmd.rank_actors import RankRunner, RankStopper
from meshgate.proxies.torch_environment import TorchEnvironment
from meshgate.ranks.on_host import StreamWriter
from meshgate.serialization.pickling import dump_class, pickled_by_value
from meshgate.serialization.sent_as_source import SentAsSource
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


@pytest.mark.parametrize("Class", [StepRunner, FileReader, RankRunner, RankStopper, StreamWriter, TorchEnvironment])
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
