"""Runs a seed: a session under random faults, with the invariants of each part checked after every callback."""

from __future__ import annotations

import contextlib
import gc
import logging
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from meshgate import EngineDiedError, SessionExpiredError, StepFailedError, SupervisionError, ValueLostError
from meshgate.session.dispatch import Dispatcher
from meshgate.session.serial_thread import SerialThread
from meshgate.session.transport.connection_thread import ConnectionThread
from meshgate_gateway.engine.engine import Engine
from meshgate_gateway.logs import event_of
from meshgate_gateway.sessions.session_table import MAX_ENDED_LEASE, Sessions
from meshgate_gateway.settings import Settings
from meshgate_wire.messages import Failed, Values
from tests.simulation.code import with_stores
from tests.simulation.driver import HOSTS, TOKEN, WAYS, Account, Printer, call_soon, start_driver, start_on_this_loop
from tests.simulation.monarch import MESH, SimulatedMonarch, Workers
from tests.simulation.network import Network
from tests.simulation.processes import World, current_process
from tests.simulation.supervisor import Supervisor

LEASE = 10_000.0
REPORT_LIMIT = 200.0  # in which the death of a worker must be reported; calls to others go on meanwhile
LIMIT = 600.0  # virtual seconds in which everything must have arrived once the faults have ended
DETACHED = 0.75  # of the sessions
EDITING = 0.4  # of them
STEPS_BETWEEN_FAULTS = 300
STEPS_OF_EDITING = 900  # the same: agents have steps of their own
LINES_SHOWN = 30  # of the trace, when a seed fails
CHECKED_STEPS = 7  # the invariants are checked after every so many callbacks, at other ones each time


@dataclass
class Outcome:
    """What one seed has done."""

    calls: int = 0
    edits: int = 0
    stale: int = 0
    callbacks: int = 0
    batched: int = 0  # calls that left the engine together with others
    faults: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)


def run_seed(
    seed: int, faults: int = 12, kinds: Sequence[str] = (), detached: float = DETACHED, editing: float = EDITING
) -> Outcome:
    """Runs a seed with this number of faults, of these kinds or of all; ``detached``: with what probability it is;
    ``editing``: with what probability its drivers edit and sync code.

    Raises AssertionError if anything was lost, doubled or out of order, or if an invariant does not hold.
    """
    with _temporary_files(), World(seed) as world, _replaced(world), with_stores(world):
        outcome = _run(world, faults, kinds or list(FAULTS), detached, editing)
    if isinstance(outcome, str):
        last = "\n".join(world.trace[-LINES_SHOWN:])
        raise AssertionError(f"seed {seed} fails: {outcome}\nwhat happened last:\n{last}")
    return outcome


def _run(world: World, faults: int, kinds: Sequence[str], detached: float, editing: float) -> Outcome | str:
    """The outcome, or the traceback of an exception, which would keep the simulation alive."""
    simulation = Simulation(world, detached, editing)
    try:
        return simulation.run(faults, kinds)
    except Exception:  # noqa: BLE001 - whatever the seed has found
        return traceback.format_exc()
    finally:
        simulation.close()


class Simulation:
    """A gateway, its network, and the drivers of one session."""

    def __init__(self, world: World, detached: float, editing: float) -> None:
        self.world, self.chance = world, world.chance
        self.workers: Workers = Workers()
        world.facts["workers"] = self.workers
        world.facts["batched"] = 0
        settings = Settings(token=TOKEN, mesh="workers=tcp://host-0:1,tcp://host-1:1", lease=LEASE)
        self.supervisor = Supervisor(world, settings)
        self.supervisor.start_server()
        self.network = Network(world, self.supervisor.address)
        self.account = Account(detached=self.chance.random() < detached, edits=self.chance.random() < editing)
        self.driver = start_driver(world, self.account, self.network)
        self.outcome = Outcome()
        self.killed_drivers = 0
        self._drivers: dict[str, str] = {}  # the name of each driver by its identity as a holder, in order
        self._holder = 0  # of them, the newest that has held the session
        world.checks.append(self._check)

    def run(self, faults: int, kinds: Sequence[str]) -> Outcome:
        self.world.run(lambda: self.account.ready, LIMIT)
        if not self.account.detached:
            kinds = [kind for kind in kinds if kind not in FOR_DETACHED] or ["connection cut"]
        if not self.account.edits:
            kinds = [kind for kind in kinds if kind not in FOR_EDITING] or ["connection cut"]
        between = STEPS_OF_EDITING if self.account.edits else STEPS_BETWEEN_FAULTS
        for _ in range(faults):
            self.pause(between)
            self._inject(self.chance.choice(kinds), FAULTS)
        self.pause(between)
        ends = [end for end in ENDS if not self.account.edits or end not in LONG_ENDS]
        self._inject(self.chance.choice(ends), ENDS)
        self.world.run(self.nothing_left, LIMIT)
        self._check_account()
        self.outcome.calls, self.outcome.callbacks = self.account.calls, self.world.steps
        self.outcome.batched = self.world.facts["batched"]
        self.outcome.edits, self.outcome.stale = self.account.edited, self.account.stale
        self.outcome.trace = self.world.trace
        return self.outcome

    def _inject(self, name: str, kinds: Mapping[str, Callable[[Simulation], None]]) -> None:
        self.outcome.faults[name] += 1
        self.world.note(name)
        kinds[name](self)

    def pause(self, callbacks: int) -> None:
        """Lets everything run for a random number of callbacks."""
        end = self.world.steps + self.chance.randrange(callbacks)
        self.world.run(lambda: self.world.steps >= end, LIMIT)

    def attach(self) -> None:
        """Starts a driver that takes over."""
        self.killed_drivers += 1
        self.driver = start_driver(self.world, self.account, self.network)

    def close(self) -> None:
        self.supervisor.restart = False
        for process in [*self.world.processes]:
            process.kill()
        self.supervisor.close()

    # --- what must hold

    def _check(self) -> None:
        assert not self.world.problems, self.world.problems
        if self.world.steps % CHECKED_STEPS:
            return
        for process in self.world.processes:
            client, engine, sessions = (process.facts.get(name) for name in ("client", "engine", "sessions"))
            if client is not None:
                self._drivers.setdefault(client._connection._reconnector._holder, process.name)
                client._connection._validate()
                for call in client.calls:
                    for future in call.futures():
                        future.validate_state()
            if engine is not None:
                engine.link.session.validate_state()
                self._check_holder(engine._ledger.holders.identity)
            if sessions is not None:
                sessions.validate_state()

    def _check_holder(self, identity: str | None) -> None:
        """A driver loses the session only to one that was started after it."""
        if identity in self._drivers:
            number = list(self._drivers).index(identity)
            assert number >= self._holder, f"{self._drivers[identity]} has displaced its successor"
            self._holder = number

    def _check_account(self) -> None:
        """Each call has run once and in order, and what was printed and sent has arrived in order."""
        account = self.account
        recorded = list(self.workers.recorded.values())
        assert len(recorded) == HOSTS, "the session has lost its workers"
        for name, way in WAYS.items():
            for rank in way.ranks:
                kept = recorded[rank].get(name, [])
                assert kept == list(range(len(kept))), f"{name} on rank {rank}: {_differences(kept)}"
                assert len(kept) >= account.answered[name], f"{name} on rank {rank} was answered and has not run"
                assert len(kept) == account.answered[name] or not account.ended, f"{name} was not answered"
        for name, arrived in (("lines", account.printed), ("messages", account.messages)):
            once = list(dict.fromkeys(arrived)) if self.killed_drivers else arrived  # two drivers may have read one
            assert once == list(range(len(once))), f"{name}: {_differences(once)}"
            assert len(once) == account.answered[name] or not account.ended, f"{name}: some have not arrived"

    def nothing_left(self) -> bool:
        """Whether the session is over, and with it its engine and its workers."""
        server = self.supervisor.server
        sessions: Sessions | None = server.facts.get("sessions") if server is not None else None
        left = [*self.workers.alive, *self.workers.agents]
        return sessions is not None and sessions.statistics().sessions == 0 and not left


def _differences(numbers: list[int]) -> str:
    counts = Counter(numbers)
    lost = sorted(set(range(max(numbers, default=-1) + 1)) - set(numbers))
    doubled = [number for number, count in counts.items() if count > 1]
    return f"{len(numbers)} arrived; lost {lost[:9]}, doubled {doubled[:9]}, in order: {numbers == sorted(numbers)}"


# --- faults


def _refuse(simulation: Simulation) -> None:
    network, seconds = simulation.network, simulation.chance.choice((0.1, 3.0, 60.0))
    network.refusing = True
    network.cut()
    simulation.world.call_later(seconds, lambda: setattr(network, "refusing", False))


def _delay(simulation: Simulation) -> None:
    simulation.network.delay = simulation.chance.choice((0, 0.0001, 0.01, 0.1))


def _freeze(kind: str) -> Callable[[Simulation], None]:
    def freeze(simulation: Simulation) -> None:
        processes = [process for process in simulation.world.processes if process.name.startswith(kind)]
        if processes:
            simulation.chance.choice(processes).freeze(simulation.chance.choice((0.01, 1.0, 30.0)))

    return freeze


def _kill_server(simulation: Simulation) -> None:
    if simulation.supervisor.server is not None:
        simulation.supervisor.server.kill()


def _kill_agent(simulation: Simulation) -> None:
    if simulation.workers.agents:
        simulation.chance.choice(simulation.workers.agents).process.kill()


def _kill_driver(simulation: Simulation) -> None:
    simulation.driver.kill()
    simulation.attach()


def _kill_busy_driver(simulation: Simulation) -> None:
    """Kills a driver to which messages have come that it has not read."""
    simulation.account.busy = True
    simulation.pause(STEPS_BETWEEN_FAULTS)
    _kill_driver(simulation)
    simulation.account.busy = False


def _kill_attaching_driver(simulation: Simulation) -> None:
    """Kills a driver while it attaches, at any point. What it sent last arrives after its successor has taken over."""
    _kill_driver(simulation)
    simulation.pause(150)
    simulation.network.hold(simulation.chance.choice((0.1, 3.0, 30.0)))
    simulation.pause(150)
    _kill_driver(simulation)


def _many_cuts(simulation: Simulation) -> None:
    for _ in range(simulation.chance.randrange(1, 10)):
        simulation.network.cut()
        simulation.pause(150)


FAULTS: dict[str, Callable[[Simulation], None]] = {
    "connection cut": lambda simulation: simulation.network.cut(),
    "connection lost silently": lambda simulation: simulation.network.cut_silently(),
    "connection cut at one end": lambda simulation: simulation.network.cut_one_end(),
    "many cuts in a row": _many_cuts,
    "no connection for a time": _refuse,
    "other latency": _delay,
    "server frozen": _freeze("server"),
    "engine frozen": _freeze("engine"),
    "driver frozen": _freeze("driver"),
    "worker frozen": _freeze("worker"),
    "sync agent frozen": _freeze("agent"),
    "network frozen": _freeze("network"),
    "sync agent killed": _kill_agent,
    "server killed": _kill_server,
    "driver killed, another attaches": _kill_driver,
    "driver killed while it attaches": _kill_attaching_driver,
    "driver killed while it is busy": _kill_busy_driver,
}


FOR_EDITING = ("sync agent frozen", "sync agent killed")
FOR_DETACHED = (
    "driver killed, another attaches",
    "driver killed while it attaches",
    "driver killed while it is busy",
)


# --- how a session ends


def _end(simulation: Simulation) -> None:
    simulation.account.ending = True
    simulation.world.run(lambda: simulation.account.ended, LIMIT)


def _kill_engine(simulation: Simulation) -> None:
    next(worker for worker in simulation.workers.alive).engine.kill()
    simulation.world.run(lambda: simulation.account.lost is not None, LIMIT)
    assert isinstance(simulation.account.lost, EngineDiedError)


def _kill_worker(simulation: Simulation) -> None:
    """The driver learns where a worker has died, and ends the session."""
    worker = simulation.chance.choice([each for each in simulation.workers.alive if each.mesh == MESH])
    worker.process.kill()
    simulation.world.run(lambda: simulation.account.lost is not None, REPORT_LIMIT)
    lost = simulation.account.lost
    if isinstance(lost, StepFailedError):  # of what takes a value that was put after the death
        assert f"on workers-{worker.rank} ended" in str(lost), lost
        return
    assert isinstance(lost, (SupervisionError, ValueLostError))
    where = lost.hosts if isinstance(lost, ValueLostError) else lost.failure.hosts if lost.failure is not None else {}
    assert set(where.values()) == {f"workers-{worker.rank}"}, lost


def _abandon(simulation: Simulation) -> None:
    """No driver takes over, until the lease is over. One that then comes back learns it.

    A session that is not detached may have less time: the server may have noticed that its driver was gone.
    """
    simulation.driver.kill()
    start = simulation.world.now
    simulation.world.run(simulation.nothing_left, LEASE + LIMIT)
    lasted, lease = simulation.world.now - start, LEASE if simulation.account.detached else MAX_ENDED_LEASE
    assert lasted > lease - LIMIT, f"the session has ended after {lasted} s, before its lease"
    simulation.attach()
    simulation.world.run(lambda: simulation.account.lost is not None, LIMIT)
    assert isinstance(simulation.account.lost, SessionExpiredError)


ENDS: dict[str, Callable[[Simulation], None]] = {
    "session ended by its driver": _end,
    "engine killed": _kill_engine,
    "worker killed": _kill_worker,
    "lease expired": _abandon,
}


LONG_ENDS = ("lease expired",)  # in which agents exchange heartbeats for hours

# --- what is replaced below the real code


@contextlib.contextmanager
def _temporary_files() -> Iterator[None]:
    """In a directory of their own, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="meshgate-") as folder, mock.patch.object(tempfile, "tempdir", folder):
        yield


@contextlib.contextmanager
def _replaced(world: World) -> Iterator[None]:
    with contextlib.ExitStack() as patches:
        for target, name, replacement in (
            (ConnectionThread, "start", start_on_this_loop),
            (SerialThread, "call", call_soon),
            (gc, "freeze", lambda: None),
            *((Dispatcher, name, _expected(world, name)) for name in ("_values", "_failed")),
        ):
            patches.enter_context(mock.patch.object(target, name, replacement))
        for path, new in (
            ("meshgate.session.session.OutputPrinter", Printer),
            ("meshgate_gateway.engine.monarch.interface.connect", SimulatedMonarch),
            ("meshgate_gateway.engine.__main__.Engine", _noted("engine", Engine)),
            ("meshgate_gateway.gateway.Sessions", _noted("sessions", Sessions)),
            ("meshgate_gateway.child_process.end_processes", lambda session: 0),
            ("meshgate_gateway.sessions.session_manager.start_process", _no_process),
            ("meshgate.unhandled_fault_hook", lambda failure: world.note(f"fault: {failure}")),
        ):
            patches.enter_context(mock.patch(path, new))
        patches.enter_context(_errors_are_problems(world))
        yield


def _noted(name: str, kind: Callable[..., Any]) -> Callable[..., Any]:
    """``kind``, whose instances the process that makes them remembers."""

    def make(*args: Any, **kwargs: Any) -> Any:
        made = current_process().facts[name] = kind(*args, **kwargs)
        return made

    return make


def _expected(world: World, name: str) -> Callable[..., None]:
    """A handler of replies that also checks that they are to calls of this client."""
    handle = getattr(Dispatcher, name)

    def handle_expected(dispatcher: Dispatcher, header: Values | Failed, message: object) -> None:
        if dispatcher._calls.get(header.call) is None:
            world.problems.append(f"the reply to call {header.call}, which is not of this driver, reaches it")
        handle(dispatcher, header, message)

    return handle_expected


def _no_process(*args: object) -> None:
    raise OSError("the simulation has no reaper")


@contextlib.contextmanager
def _errors_are_problems(world: World) -> Iterator[None]:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            world.problems.append(f"logged: {event_of(record)} {record.exc_info}")

    handler = Handler(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
