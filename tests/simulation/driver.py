"""A driver as a simulated process: a program that calls actors in several ways, and the account of what it has done.

The account outlives the driver. A driver that takes over continues where the account ends, by the tags of the calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import meshgate as kt
from meshgate import (
    Actor,
    Channel,
    Client,
    EngineDiedError,
    GatewayError,
    MeshgateError,
    SessionExpiredError,
    StaleCodeError,
    StepFailedError,
    SupervisionError,
    UrlDialer,
    ValueLostError,
    endpoint,
)
from meshgate.proxies.attached import AttachedSession, take_over
from meshgate.session.pending_calls import PendingAck
from meshgate.session.settings import ClientSettings
from meshgate.session.transport.connection_thread import ConnectionThread
from meshgate_wire.messages import EndSession, OutputLine
from tests.simulation.code import Project
from tests.simulation.monarch import MESH
from tests.simulation.processes import Process, World, current_process

TOKEN = "the-token-of-the-simulation"
HOSTS = 2
LARGE = 200_000  # bytes; several frames
LINE = "line "
NAMED = "batch "
CHANGED_MEANWHILE = 0.5  # of the saves: another follows before the first was sent


class Recorder(Actor):
    """``monarch.Worker`` runs these endpoints."""

    @endpoint
    def record(self, caller: str, number: int) -> int: ...

    @endpoint
    def wait(self, number: int, seconds: float) -> int: ...

    @endpoint
    def echo(self, number: int, data: bytes) -> tuple[int, bytes]: ...

    @endpoint
    def say(self, number: int) -> int: ...

    @endpoint
    def answer(self, port: Any, number: int) -> int: ...

    @endpoint
    def make(self, number: int) -> list[int]: ...

    @endpoint
    def use(self, caller: str, value: list[int]) -> int: ...

    @endpoint
    def hold(self, number: int, reference: Any) -> None: ...

    @endpoint
    def use_held(self, number: int) -> int: ...

    @endpoint
    def let_go(self) -> None: ...

    @endpoint
    def version(self) -> int: ...


@dataclass(frozen=True)
class Way:
    """A way of calling: up to ``depth`` calls in flight to ``ranks``, posted together if it is a ``burst``."""

    depth: int
    ranks: tuple[int, ...]
    call: Callable[[Driver, int], Any]
    expected: Callable[[int], object]
    burst: bool = False


WAYS: dict[str, Way] = {
    "one": Way(1, (0,), lambda to, n: to.rank(0).record.call_one("one", n), lambda n: n),
    "many": Way(8, (0, 1), lambda to, n: to.actors.record.call("many", n), lambda n: [n] * HOSTS),
    "large": Way(2, (1,), lambda to, n: to.rank(1).echo.call_one(n, _data(n)), lambda n: (n, _data(n))),
    "slow": Way(2, (0,), lambda to, n: to.rank(0).wait.call_one(n, (n % 7) ** 2 / 10), lambda n: n),
    "lines": Way(2, (1,), lambda to, n: to.rank(1).say.call_one(n), lambda n: n),
    "burst": Way(24, (0,), lambda to, n: to.rank(0).record.call_one("burst", n), lambda n: n, burst=True),
    "kept": Way(3, (0, 1), lambda to, n: to.use_kept(n), lambda n: [n] * HOSTS),
    "put": Way(2, (0, 1), lambda to, n: to.use_put(n), lambda n: [n] * HOSTS),
    "named": Way(2, (0, 1), lambda to, n: to.use_named(n), lambda n: [n] * HOSTS),
    "messages": Way(2, (0,), lambda to, n: to.rank(0).answer.call_one(to.port, n), lambda n: n),
    "held": Way(2, (0, 1), lambda to, n: to.use_held(n), lambda n: [n] * HOSTS),
}


def _data(number: int) -> bytes:
    return bytes([number % 251]) * (number * 7919 % LARGE)


@dataclass
class Account:
    """What the drivers of one session have done. ``answered``: by way, how many calls were answered, in order.

    ``ready`` once the actors are up and the session, if it is to be ``detached``, is; set ``busy`` to make the driver
    leave messages unread, and ``ending`` to make it finish. ``lost`` is the error by which a driver learned that its
    session or a worker is lost. With ``edits``, drivers have saved a file ``edited`` times and pushed it each time;
    ``stale`` of the spawns that followed raised.
    """

    answered: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))
    printed: list[int] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    session: str = ""
    detached: bool = True
    edits: bool = False
    edited: int = 0
    spawned: int = 0
    stale: int = 0
    drivers: int = 0
    ready: bool = False
    busy: bool = False
    ending: bool = False
    ended: bool = False
    lost: MeshgateError | None = None

    @property
    def calls(self) -> int:
        return sum(self.answered.values())


def start_driver(world: World, account: Account, network: object) -> Process:
    """Starts the account's first driver, or one that takes over the session."""
    account.drivers += 1
    process = Process(world, f"driver {account.drivers}")
    process.facts |= {"network": network, "account": account}
    process.start(_drive(Driver(world, account, process)))
    return process


async def _drive(driver: Driver) -> None:
    try:
        await driver.run()
    except (EngineDiedError, SessionExpiredError) as error:
        client = current_process().facts["client"]
        client.validate_state()
        assert not list(client.calls), "the session is over, and calls still wait"
        driver.account.lost = error
    except (SupervisionError, ValueLostError, StepFailedError) as error:
        driver.account.lost = error
        await end_session(current_process().facts["client"])


async def end_session(client: Client) -> None:
    ack = PendingAck(0, "end of the session")
    client.request(ack, lambda call: EndSession(call=call), stream=0, even_if_failed=True, last=True)
    with contextlib.suppress(GatewayError):  # cut off: the session has ended, but its answer is lost
        await ack.future


class Driver:
    def __init__(self, world: World, account: Account, process: Process) -> None:
        self._chance = random.Random(world.chance.random())
        self._world, self.account, self._process = world, account, process
        self._attached: AttachedSession | None = None
        self._receiver: Any = None
        self._held: deque[Any] = deque(maxlen=2)  # kept meshes
        self._named: dict[int, Any] = {}  # kept meshes that have a name
        self._fetched: dict[tuple[str, int], Any] = {}  # what each call has also fetched, by its way and number
        self._hosts: Any = None
        self.actors: Any = None
        self.port: Any = None

    def rank(self, rank: int) -> Any:
        return self.actors.slice(hosts=rank)

    def use_kept(self, number: int) -> Any:
        """The driver drops a kept mesh soon; if it is killed, the gateway has to."""
        with kt.tag("keep"):
            self._held.append(self.actors.make.keep(number))
        return self.actors.use.call("kept", self._held[-1])

    def use_put(self, number: int) -> Any:
        """Fetches the value too, while it is used."""
        self._held.append(self.actors.put([number]))
        self._fetched["put", number] = self._held[-1]._fetch()
        return self.actors.use.call("put", self._held[-1])

    def use_named(self, number: int) -> Any:
        """Takes the values that an earlier driver has left under the name, if it has left any."""
        if number not in self._named:
            with kt.tag("keep"):
                self._named[number] = self.actors.make.keep(number).named(f"{NAMED}{number}")
        self._fetched["named", number] = self._named[number]._fetch()
        return self.actors.use.call("named", self._named[number])

    def use_held(self, number: int) -> Any:
        """The driver lets go of the values at once: only the actors' references keep them."""
        with kt.tag("keep"):
            self.actors.hold.call(number, self.actors.make.keep(number).ref())
        return self.actors.use_held.call(number)

    async def run(self) -> None:
        account = self.account
        settings = ClientSettings(lease=10_000, connect_timeout=1000)
        dialer = UrlDialer("ws://127.0.0.1:1", TOKEN)
        sizes = {"workers": HOSTS}
        client = Client(dialer, settings=settings, session_id=account.session or None, mesh_sizes=sizes)
        client.unread.watching = False  # some calls end once time is real again: a thread would start
        self._process.facts["client"] = client
        await client._connection.established
        if account.session:
            await self._take_over(client)
        else:
            await self._set_up(client)
        receiving = asyncio.ensure_future(self._receive())
        editing = [self._edit(client)] if account.edits else []
        await asyncio.gather(*(self._call(name, way) for name, way in WAYS.items()), *editing)
        self._held.clear()
        await self.actors.let_go.call()  # of what an earlier driver has left
        while not self._all_arrived():  # noqa: ASYNC110 - time is virtual
            await asyncio.sleep(0.1)
        receiving.cancel()
        await end_session(client)
        account.ended = True

    async def _set_up(self, client: Client) -> None:
        self.port, self._receiver = Channel.open(client=client, name="messages")
        self._hosts = client.attach_hosts("workers", HOSTS)
        self.actors = self._hosts.spawn_procs(name=MESH).spawn("recorders", Recorder)
        await self.actors.initialized
        if self.account.detached:
            await client.detach("simulated")
        self.account.session, self.account.ready = client.session_id, True

    async def _take_over(self, client: Client) -> None:
        assert client.takeover is not None
        await client.takeover.complete
        attached = self._attached = take_over(client, replay=False, timeout=0)
        self._hosts = attached.hosts["workers"]
        for name, kept in attached.kept.items():
            number = int(name.removeprefix(NAMED))
            if number < self.account.answered["named"]:  # the release has not arrived
                kept.release()
            else:
                self._named[number], self._fetched["named", number] = kept, kept._fetch()
        self.actors, (self.port, self._receiver) = attached.actors["recorders"], attached.channels["messages"]

    async def _call(self, name: str, way: Way) -> None:
        account = self.account
        number = account.answered[name]
        pending: deque[tuple[int, Any]] = deque()
        while self._attached is not None and (earlier := self._attached.tagged(f"{name}-{number}")):
            pending.append((number, earlier[0].future))
            number += 1
        while pending or not account.ending:
            filling = not (way.burst and pending)
            while filling and len(pending) < way.depth and not account.ending:
                if not (way.burst and pending):
                    await asyncio.sleep(self._chance.choice((0, 0, 0.001, 0.1)))
                with kt.tag(f"{name}-{number}"):
                    pending.append((number, way.call(self, number)))
                number += 1
            if pending:
                called, future = pending.popleft()
                value = await future
                value = list(value.values()) if name in ("many", "kept", "put", "named", "held") else value
                assert value == way.expected(called), f"{name} {called} has another call's result"
                account.answered[name] = called + 1
                if (fetching := self._fetched.pop((name, called), None)) is not None:
                    fetched = (await fetching).values()
                    assert fetched == [[called]] * HOSTS, f"{fetched} was kept as {name} {called}"
                if name == "named" and called in self._named:
                    self._named.pop(called).release()
                self._world.note(f"{name} {called}")

    async def _edit(self, client: Client) -> None:
        """Saves, pushes and spawns at once: the new processes run what was saved, or a later save, or none is spawned.

        After the faults, a save reaches them.
        """
        project, account = Project(client), self.account
        after_faults = False
        while not after_faults:
            await asyncio.sleep(self._chance.choice((0, 0.01, 1, 10)))
            after_faults = account.ending
            number = account.edited = account.edited + 1
            project.save(number)
            project.push()
            if self._chance.random() < CHANGED_MEANWHILE:
                account.edited += 1
                project.save(account.edited)
            procs = self._hosts.spawn_procs(name=f"version {number}")
            try:
                values = await procs.spawn(f"readers of {number}", Recorder).version.call()
            except StaleCodeError:
                if after_faults:
                    raise
                account.stale += 1
            else:
                for value in values.values():
                    assert number <= value <= account.edited, f"a process of version {number} runs {value}"
                account.spawned += 1
            self._world.note(f"edited {number}")
            await procs.stop()

    async def _receive(self) -> None:
        while True:
            while self.account.busy:  # noqa: ASYNC110 - time is virtual
                await asyncio.sleep(0.1)
            self.account.messages.append(await self._receiver.recv())

    def _all_arrived(self) -> bool:
        account = self.account
        stores = [worker.store.statistics() for worker in self._world.facts["workers"].alive]
        return (
            not any(each["values"] or each["deliveries"] for each in stores)
            and len(set(account.printed)) == account.answered["lines"]
            and len(set(account.messages)) == account.answered["messages"]
        )


# --- what a driver's threads do, on its loop


class Printer:
    """In place of ``OutputPrinter``."""

    def __init__(self, files: None, *, quiet: bool) -> None:
        """Drivers here print, and write no files."""

    def put(
        self, lines: Sequence[OutputLine], printed: Callable[[], object], arrived: Sequence[OutputLine] = ()
    ) -> None:
        process = current_process()
        process.loop.call_soon(self._print, process.facts["account"], lines, printed)

    def _print(self, account: Account, lines: Sequence[OutputLine], printed: Callable[[], object]) -> None:
        account.printed += [int(line.text.removeprefix(LINE)) for line in lines if line.mesh != "meshgate"]
        printed()

    posted = printed = 0  # results do not wait for output here

    def unprinted(self) -> None:
        """No result waits for output."""

    def follow_caller(self) -> None:
        """There are no cells."""

    def close(self, timeout: float) -> None:
        """Nothing waits."""


def call_soon(thread: object, function: Callable[[], object]) -> None:
    """In place of ``SerialThread.call``."""
    current_process().loop.call_soon(function)


def start_on_this_loop(connection: ConnectionThread) -> None:
    """In place of ``ConnectionThread.start``."""
    connection._loop = current_process().loop
    connection._loop.create_task(connection._serve())
