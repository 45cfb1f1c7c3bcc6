from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conformance.upstream.applicability import RULES, Names, judge
from tests.conformance.upstream.command import judge_files, known_names
from tests.conformance.upstream.tree import Tree

HEAD = """
import os
import sys
import unittest
from unittest.mock import MagicMock, patch
import pytest
try:
    import torch
except ImportError:
    torch = None
import monarch.actor
from monarch.actor import Actor, endpoint, this_host, attach
from monarch._src.actor.host_mesh import this_proc, _spawn_admin
from monarch._src.actor import actor_mesh
from monarch._rust_bindings.monarch_hyperactor.pytokio import PythonTask
from monarch._rust_bindings.monarch_hyperactor.shape import Extent
from monarch.config import configure
from monarch.job import ProcessJob
from monarch.tools.cli import main

class Counter(Actor):
    def __init__(self):
        self._v = 0

    @endpoint
    def value(self):
        return self._v

def start():
    return this_host().spawn_procs().spawn("counter", Counter)

def spawn_privately():
    return _spawn_admin()

def through_another():
    return spawn_privately()

@pytest.fixture
def task():
    return PythonTask()

"""
PUBLIC = {"Actor", "endpoint", "this_host", "this_proc", "context", "Extent", "configure", "ProcessJob"}
REFUSED = {"attach": "the job attaches", ".to_table": "use extent", "config.port": "the job's", ".Job(x)": "left out"}
MODULES = {"monarch", "monarch.actor", "monarch._src", "monarch._src.actor", "monarch._src.actor.actor_mesh"}
NAMES = Names(
    public=lambda module, name: name in PUBLIC,
    refused=lambda path: REFUSED.get(path if path.startswith((".", "config")) else path.rpartition(".")[2], ""),
    is_module=lambda path: path in MODULES,
    missing=lambda module: module in ("torch", "bench"),
)


def rule_of(body: str, arguments: str = "") -> str:
    (verdict,) = judge(ast.parse(f"{HEAD}def test({arguments}):\n    {body}\n"), "test_a.py", NAMES).values()
    return f"{verdict.rule} {verdict.detail}".strip()


@pytest.mark.parametrize(
    "body",
    [
        "start().value.call()",
        "this_proc()",
        "Extent((1,), ('a',)); this_host()",
        "monarch.actor.this_host()",
        "actor_mesh.context()",
        "ProcessJob({'a': 1}); os._exit(1)",
        "ProcessJob({'a': 1}); patch.object(sys, 'stdin', MagicMock())",
        "start()._v",  # an attribute of the test's own actor
        "from monarch.actor import context; context()",
        "configure(other=1)",
        "actor_mesh._BATCH_S; this_host()",
    ],
)
def test_a_test_of_public_names_applies(body: str) -> None:
    assert rule_of(body) == ""


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("torch.ones(1); this_host()", "module torch"),
        ("import bench; this_host()", "module bench"),
        ("patch('monarch._src.job.start'); this_host()", "mock monarch._src.job.start"),
        ("patch.object(ProcessJob, 'kill')", "mock ProcessJob"),
        ("start()._proc_mesh", "attribute _proc_mesh"),
        ("actor_mesh._context; start()", "private monarch._src.actor.actor_mesh._context"),
        ("actor_mesh._STATE.loop; start()", "private monarch._src.actor.actor_mesh._STATE.loop"),
        ("through_another()", "private monarch._src.actor.host_mesh._spawn_admin"),
        ("PythonTask()", "rust monarch._rust_bindings.monarch_hyperactor.pytokio.PythonTask"),
        ("attach()", "refused attach: the job attaches"),
        ("start().to_table()", "refused to_table: use extent"),
        ("configure(port=1)", "refused config.port: the job's"),
        ("name = 'port'; configure(**{name: 1})", "refused config.port: the job's"),
        ("ProcessJob({}).Job(x=1)", "refused Job(x): left out"),
        ("main()", "other monarch.tools.cli.main"),
        ("os.spawnl(0, 'python', '-m', 'monarch.tools.cli')", "other monarch.tools.cli"),
        ("open('a').write('from monarch.tools.cli import main')", "other monarch.tools.cli.main"),
        ("assert 1", "none"),
        ("actor_mesh._BATCH_S", "none"),
    ],
)
def test_a_test_of_anything_else_names_the_rule_and_what_matched(body: str, rule: str) -> None:
    assert rule_of(body) == rule


def test_a_module_that_the_file_needs_is_one_of_each_test() -> None:
    (verdict,) = judge(ast.parse(f"import bench\n{HEAD}def test():\n    this_host()\n"), "test_a.py", NAMES).values()
    assert (verdict.rule, verdict.detail) == ("module", "bench")


def test_a_private_attribute_that_the_import_needs_is_one_of_each_test() -> None:
    file = HEAD + "IDS = ProcessJob._allocate(10)\ndef test_one():\n    this_host()\n"
    (verdict,) = judge(ast.parse(file), "test_a.py", NAMES).values()
    assert (verdict.rule, verdict.detail) == ("attribute", "_allocate")


def test_a_fixture_counts_as_part_of_the_test() -> None:
    assert rule_of("this_host()", "task").startswith("rust ")


def test_the_other_tests_of_a_class_do_not_count() -> None:
    source = (
        f"{HEAD}class MeshTest(unittest.TestCase):\n    def setUp(self):\n        self._host = this_host()\n"
        "    def test_a(self):\n        self._host.size()\n    def test_b(self):\n        PythonTask()\n"
    )
    verdicts = judge(ast.parse(source), "test_a.py", NAMES)
    assert [verdict.rule for verdict in verdicts.values()] == ["", "rust"]


@pytest.mark.parametrize(
    ("module", "name", "rule"),
    [
        ("monarch.actor", "this_host", "public"),
        ("monarch._src.job.process", "ProcessJob", "public"),
        ("monarch._src.actor.actor_mesh", "ActorMesh", "public"),
        ("monarch.config", "configured", "public"),
        ("monarch.config", "Encoding", "refused"),
        ("monarch.actor", "attach", "refused"),
        ("monarch._src.job.job", "set_current_job", "refused"),
        ("monarch.simulator.ir", "Command", ""),
        ("monarch._src.actor.proc_mesh", "HyProcMesh", ""),
    ],
)
def test_the_names_of_this_meshgate_are_known(tmp_path, module: str, name: str, rule: str) -> None:  # type: ignore[no-untyped-def]
    names = known_names(tmp_path)
    assert names.public(module, name) == (rule == "public")
    assert bool(names.refused(f"{module}.{name}")) >= (rule == "refused")


def test_every_test_of_a_tree_has_a_verdict(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "test_a.py").write_text(HEAD + "def test_a():\n    this_host()\n\ndef test_b():\n    main()\n")
    (tmp_path / "test_empty.py").write_text("")
    files = judge_files(Tree(tmp_path, ""))
    assert [(file.name, [verdict.rule for verdict in file.verdicts.values()]) for file in files] == [
        ("test_a.py", ["", "other"]),
        ("test_empty.py", []),
    ]
    assert {verdict.rule for file in files for verdict in file.verdicts.values()} - {""} <= set(RULES)


def test_a_module_that_refuses_to_be_imported_contains_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "refusing_torch").mkdir()
    (tmp_path / "refusing_torch/__init__.py").write_text("raise RuntimeError('PyTorch version mismatch')")
    monkeypatch.syspath_prepend(tmp_path)
    assert not known_names(tmp_path).is_module("refusing_torch.part")
