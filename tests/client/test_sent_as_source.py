"""meshgate's own actors run where meshgate is not installed."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from meshgate.images.on_host import StepRunner
from meshgate.pickling import dump_class, travels_by_value
from meshgate.pulling_on_host import FileReader
from meshgate.sent_as_source import SentAsSource

FAR_SIDE = """
import pickle, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("meshgate"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
data = sys.stdin.buffer.read()
first, second = pickle.loads(data), pickle.loads(data)
from monarch.actor import Actor
print(first.__name__, issubclass(first, Actor), first is second)
"""


@pytest.mark.parametrize("Class", [StepRunner, FileReader])
def test_a_worker_without_meshgate_makes_the_class_from_its_text(Class: type) -> None:
    data = dump_class(Class, by_value=travels_by_value(Class))
    told = subprocess.run([sys.executable, "-c", FAR_SIDE], input=data, capture_output=True, check=True)
    assert told.stdout.decode().split() == [Class.__name__, "True", "True"]


def test_a_module_without_the_line_is_refused() -> None:
    Wrong = SentAsSource("Wrong", (), {"__module__": __name__})
    with pytest.raises(TypeError, match="does not hold the line"):
        pickle.dumps(Wrong)
