"""The mistakes that readers of the documentation make: below their own lines, they see a sentence that helps."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

import meshgate as kt
from meshgate.caller import is_ours, theirs
from meshgate.shapes.shape import Extent
from meshgate.testing import FakeJob


class Trainer(kt.Actor):
    def __init__(self, rate: float) -> None:
        self.losses = [rate]

    @kt.endpoint
    def train_step(self, batch_size: int) -> float:
        return batch_size * self.losses[0]

    @kt.endpoint
    def evaluate(self) -> int:
        return 1

    def helper(self) -> None: ...


class Loader(kt.Actor):
    @kt.endpoint
    def load(self) -> None: ...


class Plain: ...


@pytest.fixture(scope="module")
def program() -> Iterator[dict[str, Any]]:
    """The names of a program with a running job."""
    with FakeJob({"workers": 2}) as job:
        state = job.state()
        hosts = state.workers
        procs = hosts.spawn_procs({"gpus": 2})
        trainers = procs.spawn("trainers", Trainer, rate=0.5)
        future = trainers.train_step.call(3)
        result = future.get(timeout=60)
        names = {"job": job, "state": state, "hosts": hosts, "procs": procs, "trainers": trainers, "future": future}
        yield {**globals(), **names, "result": result}


IS_NO_VALUE = "a future is not the value of the call: read that first, with .get() or await"
HAS_VALUES = "a value for each rank. The sizes of the dimensions: hosts=2, gpus=2. Write item(hosts=0, gpus=0) for one"
PER_HOST = 'expected a number of processes for each dimension, such as {"gpus": 2}'
NOT_A_LIST = "is neither subscriptable nor iterable: select a part with slice(hosts=0, gpus=0), and call all actors"

# What the program says, the exception, and the part of its text that helps.
MISTAKES: list[tuple[str, type[Exception], str]] = [
    # calls
    (
        "trainers.trian_step.call(3)",
        AttributeError,
        "has no endpoint 'trian_step'. Did you mean 'train_step'? Its endpoints: evaluate, train_step",
    ),
    ("trainers.train_step(3)", TypeError, "use .call(3) (every rank), .call_one(3) (a mesh of one), .choose(3) (any"),
    ("trainers.train_step.remote(3)", AttributeError, "is called with .call(), .call_one(), .choose(), .stream(), "),
    (
        "trainers.helper.call()",
        AttributeError,
        "a method of the class Trainer, not an endpoint: add the decorator @end",
    ),
    ("trainers.losses", AttributeError, "What else an actor has stays in its process: let an endpoint return it"),
    ("trainers.train_step.call(batchsize=3)", TypeError, "is not a parameter. Did you mean 'batch_size'?"),
    ("trainers.train_step.call()", TypeError, "train_step(): missing a required argument: 'batch_size'"),
    ("trainers.evaluate.call(3)", TypeError, "evaluate(): too many positional arguments"),
    ("trainers.train_step.call_one(3)", ValueError, "select one with slice(hosts=0, gpus=0), or use call() for all"),
    ("trainers.train_step.call(future)", TypeError, "a future is not its value. Pass future.get(); or, to leave the"),
    ("trainers.train_step.call(trainers.evaluate)", TypeError, "pass the actor mesh, and call its endpoint there"),
    ("import threading; trainers.train_step.call(threading.Lock())", TypeError, "argument 'batch_size'"),
    ("trainers.train_step.call(job)", kt.InvalidRequestError, "a job cannot be sent to workers, because it contains"),
    # spawns
    ("procs.spawn(Trainer, 'trainers')", TypeError, "the order is spawn(name, Class, ...)"),
    ("procs.spawn('trainers', Trainer(0.5))", ValueError, "spawn(name, Trainer, ...), not Trainer(...)"),
    ("procs.spawn('plain', Plain)", ValueError, "Define it as class Plain(Actor), with the Actor of meshgate or "),
    ("procs.spawn('trainers', 'Trainer')", ValueError, "spawn(name, Class, ...) needs the class of the actors"),
    ("procs.spawn('trainers', Trainer, ratte=0.5)", TypeError, "Did you mean 'rate'?"),
    ("procs.spawn('loaders', Loader, 3)", TypeError, "takes no arguments, because the class has no __init__: define"),
    ("hosts.spawn_procs(2)", TypeError, f"per_host is 2: {PER_HOST}"),
    ("hosts.spawn_procs(['gpus'])", ValueError, f"per_host is ['gpus']: {PER_HOST}"),
    ("hosts.spawn_procs({'gpus': 0})", ValueError, "per_host['gpus'] is 0: expected a number of processes, at least 1"),
    ("hosts.spawn_procs({'gpus': 100_000})", ValueError, "gateways accept at most 65536 processes in a dimension"),
    ("hosts.spawn_procs({'hosts': 2})", ValueError, "per_host labels ['hosts'] overlap with host labels ('hosts',)"),
    ("hosts.spwan_procs()", AttributeError, "Did you mean 'spawn_procs'?"),
    ("hosts.sync_workspace()", AttributeError, "unlike Monarch: job.sync() brings the code to the workers"),
    ("procs.train_step.call(3)", AttributeError, "Endpoints are called on the actors that spawn() returns"),
    ("job.spawn_procs()", AttributeError, "write job.state().workers.spawn_procs(...)"),
    ("kt.ProcessJob({'trainers': 1}).spawn('a', Trainer)", AttributeError, "write job.state().trainers.spawn(...)"),
    ("kt.ProcessJob({'trainers': 1}).trainers", AttributeError, "write job.state().trainers"),
    ("job.sate()", AttributeError, "Did you mean 'state'?"),
    ("state.worker", AttributeError, "Available names: workers. Did you mean 'workers'?"),
    ("state['workers']", TypeError, "write state.workers, or getattr(state, name)"),
    # parts of meshes
    ("trainers[0]", TypeError, NOT_A_LIST),
    ("for trainer in trainers: pass", TypeError, NOT_A_LIST),
    ("trainers.slice(gpu=0)", TypeError, "Did you mean 'gpus'? The sizes of the dimensions: hosts=2, gpus=2"),
    ("trainers.slice(gpus=2)", IndexError, "gpus=2. The sizes of the dimensions: hosts=2, gpus=2"),
    ("trainers.rename(gpu='tp')", ValueError, "'gpu' is not an existing dim. Expected an integer size constraint on a"),
    ("trainers.size('rows')", KeyError, "does not have dimension 'rows'"),
    # futures
    ("future + 1", TypeError, IS_NO_VALUE),
    ("sum([future, future])", TypeError, IS_NO_VALUE),
    ("future < 0.5", TypeError, IS_NO_VALUE),
    ("-future", TypeError, IS_NO_VALUE),
    ("float(future)", TypeError, IS_NO_VALUE),
    ("range(future)", TypeError, IS_NO_VALUE),
    ("f'{future:.2f}'", TypeError, IS_NO_VALUE),
    ("'%.2f' % future", TypeError, IS_NO_VALUE),
    ("future[0]", TypeError, IS_NO_VALUE),
    ("for value in future: pass", TypeError, IS_NO_VALUE),
    ("loss, accuracy = future", TypeError, IS_NO_VALUE),
    ("future.values()", AttributeError, "read the value of the call first, .get().values"),
    ("future.mean()", AttributeError, "read the value of the call first, .get().mean"),
    ("future.resutl()", AttributeError, "Did you mean 'result'?"),
    ("future.get('3')", TypeError, "invalid timeout '3': expected a number of seconds"),
    ("future.get(timeout=-1)", ValueError, "expected a non-negative, finite number of seconds"),
    # results
    ("result[0]", TypeError, "a ValueMesh is not subscriptable. The sizes of the dimensions: hosts=2, gpus=2. Write "),
    ("result.mean()", AttributeError, f"'ValueMesh' object has no attribute 'mean': it has {HAS_VALUES}"),
    ("result.vlaues()", AttributeError, "Did you mean 'values'?"),
    ("result.item(hosts=0)", KeyError, "item needs dimensions: ['gpus']. The sizes of the dimensions: hosts=2, gpus=2"),
    ("result + 1", TypeError, f"a ValueMesh has {HAS_VALUES}"),
    ("result > 0.5", TypeError, f"a ValueMesh has {HAS_VALUES}"),
    ("float(result)", TypeError, f"a ValueMesh has {HAS_VALUES}"),
    ("f'{result:.2f}'", TypeError, f"a ValueMesh has {HAS_VALUES}"),
    # jobs
    ("kt.ProcessJob(2)", ValueError, "expected the number of hosts of each mesh, such as {'workers': 2}"),
    ("kt.ProcessJob(hosts=2)", TypeError, "write meshes={'workers': 2}"),
    ("kt.ProcessJob({'workers': 1}, image='torch')", TypeError, "expected an Image(…), whose steps run here"),
    ("kt.LocalJob('workers')", TypeError, "write LocalJob(['workers'])"),
    ("kt.LocalJob(2)", TypeError, "LocalJob: 2: expected the names of hosts, or numbers of hosts by name"),
    ("kt.KubernetesJob(replicas=2, gpus=8)", TypeError, "write compute=Compute(replicas=2, gpus=8)"),
    ("kt.KubernetesJob({'workers': 2})", TypeError, "expected a Compute(…)"),
    ("kt.KubernetesJob(kt.Compute(), naem='a')", TypeError, "Did you mean 'name'?"),
    ("kt.Compute(tolerance=[])", TypeError, "Did you mean 'tolerations'?"),
    ("kt.SlurmJob(nodes=2)", TypeError, "write meshes={'workers': 2}"),
    ("kt.SlurmJob({'workers': 2}, gpus=8)", TypeError, "time_limit, partition, log_dir, exclusive, gpus_per_node, "),
    ("kt.LoginJob", AttributeError, "use SlurmJob(login=...)"),
]


@pytest.mark.parametrize(("mistake", "kind", "text"), MISTAKES, ids=[mistake for mistake, _, _ in MISTAKES])
def test_a_mistake_is_answered_with_what_helps_below_the_programs_lines(
    program: dict[str, Any], mistake: str, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        exec(compile(mistake, "<program>", "exec"), dict(program))
    assert text in str(caught.value)
    shown = theirs(caught.value, kt.MeshgateError)
    frames = [frame for frame, _ in traceback.walk_tb(shown)]
    assert frames[-1].f_code.co_filename == "<program>"
    assert not any(map(is_ours, frames))


def test_what_holds_values_can_still_be_tested_printed_and_copied(program: dict[str, Any]) -> None:
    future, result = program["future"], program["result"]
    assert bool(future)
    assert bool(result)
    assert f"{future}" == str(future)
    assert f"{result}" == str(result)
    assert result.extent == Extent(["hosts", "gpus"], [2, 2])
    for same in (copy.copy(result), copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert same.values() == [1.5] * 4
