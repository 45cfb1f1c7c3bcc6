"""Code sent as source, to this Python and to every other one that this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import cloudpickle
import pytest

SCRIPT = '''
from __future__ import annotations

import collections
import dataclasses
import enum
import pathlib
import sys
import typing
from dataclasses import dataclass, field

FACTOR = 3
double, triple = (lambda x: 2 * x), (lambda x: 3 * x)


class Colour(enum.Enum):
    RED = 1

    def describe(self):
        return f"{self.name} is {self.value}"


@dataclass
class Config:
    rate: float = 0.5
    layers: list[int] = field(default_factory=list)
    kind: typing.ClassVar[str] = "plain"

    def scaled(self):
        return self.rate * FACTOR


@dataclass(order=True)
class Child(Config):
    extra: str = "x"


@dataclass(frozen=True)
class Frozen:
    name: str
    twice: dataclasses.InitVar[bool] = False
    _: dataclasses.KW_ONLY
    size: int = 1

    def __post_init__(self, twice):
        assert twice or self.size == 1


@dataclass(slots=True)
class Slotted:
    a: int
    b: int = 2


class Named(typing.NamedTuple):
    x: int
    y: int = 5

    def total(self):
        return self.x + self.y


Pair = collections.namedtuple("Pair", "left right")


class Base:
    def __init__(self, start):
        self.start = start

    def value(self):
        return self.start


class Derived(Base):
    def value(self):
        return super().value() + FACTOR

    @property
    def doubled(self):
        return double(self.value())

    @classmethod
    def make(cls):
        return cls(1)

    @staticmethod
    def plain():
        return [x * y for x in range(3) for y in range(x)]


def outer(n):
    def inner(x):
        try:
            return x + n
        finally:
            pass
    return inner


def check(config, child, frozen, slotted, named, pair, colour, path):
    """Runs on the worker."""
    assert config == Config(0.5, [1]) and Config().layers == [] and config.scaled() == 1.5, config
    assert repr(child) == "Child(rate=1.0, layers=[], extra='y')", repr(child)
    assert child < dataclasses.replace(child, extra="z") and Child.kind == "plain"
    assert hash(frozen) and Frozen("a", True, size=2).size == 2
    try:
        frozen.name = "changed"
    except dataclasses.FrozenInstanceError:
        pass
    else:
        raise AssertionError("a frozen dataclass was changed")
    assert slotted == Slotted(1) and slotted.b == 2
    assert named == (1, 5) and named.total() == 6 and named._replace(x=2).x == 2
    assert pair.left == 1 and pair._fields == ("left", "right")
    assert colour is Colour.RED and colour.describe() == "RED is 1"
    assert (triple(2), double(2), outer(1)(2)) == (6, 4, 3)
    assert Derived(2).value() == 5 and Derived.make().doubled == 8 and Derived.plain() == [0, 0, 2]
    assert path == pathlib.Path("/a/b") and sum(x for x in [1, 2]) == FACTOR
    return f"{sys.version_info.major}.{sys.version_info.minor}"


if __name__ == "__main__":
    from meshgate.serialization.pickling import dumps

    values = (Config(0.5, [1]), Child(1.0, [], "y"), Frozen("a"), Slotted(1), Named(1), Pair(1, 2), Colour.RED)
    values += (pathlib.Path("/a/b"),)
    pickled = dumps((check, values), worker_python=lambda: sys.argv[1])
    sys.stdout.buffer.write(pickled.data)
'''
LOAD = "import pickle, sys; check, values = pickle.loads(sys.stdin.buffer.read()); print(check(*values))"


def interpreters() -> list[str]:
    """This interpreter, and others from 3.10 on that are installed."""
    homes = [*Path.home().glob(".pyenv/versions/*/bin"), *map(Path, os.environ["PATH"].split(os.pathsep))]
    found = {}
    for minor in range(10, 14):
        name = f"python3.{minor}"
        for home in homes:
            if "shims" not in home.parts and (home / name).exists():
                found.setdefault(name, str(home / name))
    return [sys.executable, *(path for name, path in found.items() if not name.endswith(f".{sys.version_info.minor}"))]


def dump(tmp_path: Path, script: str, version: str) -> subprocess.CompletedProcess[bytes]:
    path = tmp_path / "script.py"
    path.write_text(script)
    return subprocess.run([sys.executable, str(path), version], capture_output=True, check=False, timeout=60)


@pytest.mark.parametrize("python", interpreters(), ids=lambda path: Path(path).resolve().name)
def test_what_a_script_defines_runs_on_another_python(tmp_path: Path, python: str) -> None:
    other = "3.10" if sys.version_info[:2] != (3, 10) else "3.11"  # whichever it is: the code does not depend on it
    dumped = dump(tmp_path, SCRIPT, other)
    assert dumped.returncode == 0, dumped.stderr.decode()
    assert b"double, triple" in dumped.stdout  # the source, not its bytecode
    (tmp_path / "worker").mkdir()
    shutil.copytree(Path(cloudpickle.__file__).parent, tmp_path / "worker" / "cloudpickle")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "worker")}
    loaded = subprocess.run(
        [python, "-c", LOAD], input=dumped.stdout, env=environment, capture_output=True, check=False, timeout=60
    )
    assert loaded.returncode == 0, loaded.stderr.decode()
    assert loaded.stdout.startswith(b"3.")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("exec('def f(): pass', globals())", "the source of <string> is not available"),
        ("def f(): pass\nimport pathlib; pathlib.Path(__file__).touch()", None),
        ("def f():\n    match 1:\n        case _: pass", "they cannot compile"),
    ],
    ids=["no source", "unchanged", "newer syntax"],
)
def test_code_that_cannot_be_sent_is_refused_with_the_reason(tmp_path: Path, body: str, message: str | None) -> None:
    dumping = """
        import sys
        from meshgate.serialization.pickling import dumps
        dumps(f, worker_python=lambda: sys.argv[1])
    """
    done = dump(tmp_path, f"{body}\n{textwrap.dedent(dumping)}", "3.9")
    if message is None:
        assert done.returncode == 0, done.stderr.decode()
    else:
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        assert message in done.stderr.decode()
        assert f"its bytecode runs on Python {here} only, the workers run 3.9" in done.stderr.decode()
        assert "Define it in a module of your project" in done.stderr.decode()
