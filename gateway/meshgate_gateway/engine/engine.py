"""The engine of one session: forwards the client's requests to Monarch and Monarch's replies to the client.

This module connects the parts to each other, to the client's connection and to the messages they handle.
"""

from __future__ import annotations

import asyncio
import functools
import pickle
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from meshgate_gateway.control import EngineCounts, JobEnding
from meshgate_gateway.engine.admission import Admission
from meshgate_gateway.engine.calls.calling import Calling
from meshgate_gateway.engine.calls.channels import MAX_QUEUED, Backlog, Channels
from meshgate_gateway.engine.calls.kept_meshes import ReferringProcess
from meshgate_gateway.engine.calls.kept_values import KeptValues
from meshgate_gateway.engine.client_connection import ClientLink
from meshgate_gateway.engine.code.code_sync import CodeSync
from meshgate_gateway.engine.code.host_agents import HostAgents
from meshgate_gateway.engine.code.reloading import Reloading
from meshgate_gateway.engine.detached.ledger import Ledger
from meshgate_gateway.engine.dispatch import Dispatch
from meshgate_gateway.engine.engine_metrics import EngineMetrics
from meshgate_gateway.engine.failures import FailureReports
from meshgate_gateway.engine.inspection import Inspection
from meshgate_gateway.engine.interfaces import CONTROL_STREAM
from meshgate_gateway.engine.memory import ValueMemory
from meshgate_gateway.engine.meshes.attaching import Attaching, FindHosts
from meshgate_gateway.engine.meshes.host_watch import HostWatch
from meshgate_gateway.engine.meshes.lifetimes import Lifetimes
from meshgate_gateway.engine.meshes.spawning import SessionControllers, Spawning, answer
from meshgate_gateway.engine.meshes.supervision import Supervision, Watching
from meshgate_gateway.engine.monarch.interface import Fault, Monarch, refusing_address
from meshgate_gateway.engine.monarch.same_versions import versions_of
from meshgate_gateway.engine.objects.records import ActorMesh, HostMesh, ProcMesh
from meshgate_gateway.engine.objects.table import Lookup, ObjectTable
from meshgate_gateway.engine.on_worker.process import set_up_process
from meshgate_gateway.engine.output.lines import PrintedLine, fold, split_into_messages
from meshgate_gateway.engine.output.worker_streams import WorkerStreams
from meshgate_gateway.engine.telemetry import Telemetry
from meshgate_wire import Fragments
from meshgate_wire.messages import (
    Call,
    CancelCall,
    Configure,
    ConfigureMonarch,
    Done,
    EndSession,
    Host,
    Output,
    OutputLine,
    Values,
)

# Bytes of output that wait for the client, above which workers are no longer read and so block when they print. The
# limit is high while the client is disconnected: training must not stop because someone closes a laptop.
MAX_QUEUED_OUTPUT = 32 * 2**20
MAX_QUEUED_OUTPUT_DISCONNECTED = 512 * 2**20


class Engine:
    """Everything of one session except its process. All methods run on the event loop.

    ``find_hosts(mesh)`` asks the server for the hosts of a mesh. ``connection_changed`` is called with whether a client
    is connected, ``connection_refused`` when a client may not connect, or has not, ``named`` with the session's name
    once it is detached, ``counted`` with metrics, ``log_output`` with what actors print. ``host`` is where workers
    reach this process, or None if they share its machine. ``ended`` is set when the session is over, and
    ``end_reason`` says why.
    """

    def __init__(
        self,
        monarch: Monarch,
        find_hosts: FindHosts,
        connection_changed: Callable[[bool], None],
        *,
        host: str | None = None,
        connection_refused: Callable[[], object] = lambda: None,
        named: Callable[[str], object] = lambda name: None,
        counted: Callable[[EngineCounts], object] = lambda counts: None,
        log_output: Callable[[list[PrintedLine]], object] = lambda lines: None,
    ) -> None:
        self.ended = asyncio.Event()
        self.end_reason = "the client ended the session"
        self.session = ""  # its id, once a client has connected
        self._monarch = monarch
        self._log_output = log_output
        self._report_connection, self._report_name = connection_changed, named
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stream_output = True
        self._metrics, self._memory = (
            EngineMetrics(counted),
            ValueMemory(lambda mesh, rank: self._calling.awaits(mesh, rank), self._unsent),  # noqa: PLW0108 - made later
        )
        self.link = ClientLink(
            self._metrics,
            connection_changed=self._connection_changed,
            flushed=self._apply_limits,
            violated=lambda reason: self._start_task(self._fail(reason)),
            refuse=self._memory.refuse_arguments,
        )
        self._connect_parts(monarch, find_hosts, host)
        self.link.received = self._dispatch.received
        self.admission = Admission(
            self.link,
            self._ledger,
            self._dispatch,
            self._objects,
            self.code,
            self._hosts.described,
            connection_refused,
            self._holder_changed,
        )
        self._dispatch.add(
            {
                Call: self._calling.call,
                CancelCall: self._cancel,
                Configure: self._configure,
                ConfigureMonarch: self._configure_monarch,
                EndSession: self._end,
            },
            self._attaching.handlers(),
            self._spawning.handlers(),
            self._controllers.handlers(),
            self._lifetimes.handlers(),
            self._kept.handlers(),
            self._channels.handlers(),
            self.code.handlers(),
            self._reloading.handlers(),
            self._ledger.handlers(),
            self._telemetry.handlers(),
        )

    def _connect_parts(self, monarch: Monarch, find_hosts: FindHosts, host: str | None) -> None:
        monarch.same_versions.laptop = lambda: versions_of(self.link.session.peer)
        self._objects = ObjectTable()
        self._lookup = Lookup(self._objects, monarch)
        self._failures = FailureReports(self._objects.add, self.link.send)
        self._backlog = Backlog(self._loop.call_later, self.notice)
        self.streams = WorkerStreams(
            label=self._lookup.label,
            printed=self._send_output,
            ended=self._process_ended,
            watched=self._process_watched,
            controllers=answer(self._dump_controllers),
            reported=self._backlog.reported,
            late=self.notice,
            ask=self._memory.ask,
            fetch_kept=self._fetch_kept,
            refers=self._refers,
        )
        self._connect_calls(monarch)
        self._connect_code(monarch, host)
        self._connect_meshes(monarch, find_hosts)

    def _connect_calls(self, monarch: Monarch) -> None:
        objects, lookup = self._objects, self._lookup
        self._kept = KeptValues(objects, lookup, monarch)
        self._calling = Calling(
            objects,
            lookup,
            monarch,
            self.link.send,
            idle=self.link.flush,
            metrics=self._metrics,
            memory=self._memory,
            kept=self._kept,
            unread_output=self.streams.unread,
            printed=self.streams.mark,
            cancel_on=self.streams.cancel,
            notice=self.notice,
        )
        self._kept.servers.calls = self._calling
        self._ledger = Ledger(
            self.link.post,
            self.link.queued,
            self.link.queued_on,
            running=self._calling.is_running,
            open_calls=self._open_calls,
            streamed=self._calling.streamed,
            connected=self.link.connected,
            detached=self._detached,
        )
        self._dispatch = Dispatch(
            lambda: self.link.session,
            self._failures,
            start_task=self._start_task,
            ledger=self._ledger,
            flush_soon=self.link.flush_soon,
            notice=self.notice,
            flush_calls=self._calling.flush,
        )
        self._channels = Channels(
            objects,
            lookup,
            monarch,
            self.link.send,
            self._backlog,
            queued=self._queued_on,
            paused=self._limit,
            start_task=self._start_task,
            kept=self._kept,
            notice=self.notice,
        )

    def _connect_code(self, monarch: Monarch, host: str | None) -> None:
        lookup, calling = self._lookup, self._calling
        make_agents = functools.partial(
            HostAgents,
            monarch,
            part_of_hosts=lookup.part_of_hosts,
            start_task=self._start_task,
            set_up_process=self._set_up_process,
            end_processes=self.streams.drop,
        )
        self.code = code = CodeSync(
            self._objects, self.link.send, make_agents, host, self._metrics, self.link.connected
        )
        self._telemetry = Telemetry(
            monarch,
            self.link.send,
            start_task=self._start_task,
            failures=self._failures,
            notice=self.notice,
            elsewhere=host is not None,
        )
        self._reloading = Reloading(
            lookup,
            monarch,
            calling,
            wait_for_version=code.wait_for_version,
            start_task=self._start_task,
            failures=self._failures,
        )

    def _connect_meshes(self, monarch: Monarch, find_hosts: FindHosts) -> None:
        objects, lookup, code, fail = self._objects, self._lookup, self.code, self._actors_ended
        self._hosts = hosts = HostWatch(objects, self.link.send, code, monarch.same_versions.laptop)
        self.inspection = Inspection(
            objects,
            self._calling,
            code,
            hosts,
            self._kept.meshes.kept_bytes,
            session_name=lambda: self._ledger.name,
            describe=self.describe,
        )
        self._supervision = Supervision(
            objects,
            self.link.send,
            self._loop.call_later,
            host_reasons=hosts.explained,
            ranks_died=fail,
            process_died=self._process_died,
        )
        self._watching = watching = Watching(
            objects,
            monarch,
            self.streams,
            start_task=self._start_task,
            ranks_died=fail,
            process_died=self._process_died,
            process_back=self._process_back,
        )
        self._kept.watch = self._reloading.watch = watching.watch
        self._attaching = Attaching(
            objects,
            lookup,
            monarch,
            self.link.send,
            find_hosts=find_hosts,
            mark_lost=hosts.mark_lost,
            ended=hosts.ended,
            hosts_attached=self._hosts_attached,
            described=hosts.described,
            watch=watching.watch,
        )
        self._spawning = Spawning(
            objects,
            lookup,
            monarch,
            code,
            start_task=self._start_task,
            failures=self._failures,
            set_up_process=self._set_up_process,
            bring_up_to_date=self._reloading.bring_up_to_date,
            end_processes=self.streams.drop,
            actors_up=self._supervision.actors_up,
            actors_failed=fail,
            watch=watching.watch,
            version_problem=self._supervision.version_problem,
            deliver_kept=self._kept.deliver,
        )
        self._controllers = SessionControllers(objects, monarch, self._spawning)
        self._lifetimes = Lifetimes(
            objects,
            lookup,
            monarch,
            self.link.send,
            self._start_task,
            self._failures,
            wait_available=hosts.wait_available,
            lost_hosts=hosts.reasons,
            ranks_stopped=fail,
            process_stopped=self._kept.servers.process_died,
            end_processes=self.streams.drop,
            release_kept=self._kept.meshes.release,
        )

    async def listen(self, host: str | None) -> None:
        """Listens for the session's worker processes; see ``WorkerStreams.listen``."""
        await self.streams.listen(host)
        self._monarch.find_controllers_at(self.streams.address, self.streams.secret)

    # --- messages from and to the client ----------------------------------------------------------------

    @property
    def is_detached(self) -> bool:
        return self._ledger.active

    def _connection_changed(self, connected: bool) -> None:
        self._report_connection(connected)
        if not self._ledger.active:
            self._apply_limits()  # output may wait for a client that is gone up to another limit

    def _detached(self, name: str) -> None:
        """From now on, what is sent passes through the ledger, which sends what it keeps after each flush."""
        self._report_name(name)
        self.link.keep = self._ledger.keep
        self._limit()

    def _apply_limits(self) -> None:
        """Pauses or resumes reading output and ports, by how much waits to be sent.

        Called when that may have to change: when output was sent, when the client comes or goes, when a port is no
        longer read, and after each flush while any of them is paused or the session is detached.
        """
        if self._ledger.active:
            self._ledger.feed()
            self.streams.set_reading(not self._ledger.full)
        else:
            limit = MAX_QUEUED_OUTPUT if self.link.connected() else MAX_QUEUED_OUTPUT_DISCONNECTED
            self.streams.set_reading(self.link.queued_on(CONTROL_STREAM) < limit)
        self._channels.resume()
        self.link.limiting = self._ledger.active or self.streams.paused or bool(self._channels.full)

    def _limit(self) -> None:
        self.link.limiting = True

    def _unsent(self) -> int:
        """How many bytes would wait for the driver with the next reply, which the ledger of a detached session that is
        not connected keeps instead."""
        return 0 if self._ledger.active and not self.link.connected() else self.link.queued()

    def _queued_on(self, stream: int) -> int:
        """How many bytes of a channel wait, which decides whether its port is read."""
        if not self._ledger.active:
            return self.link.queued_on(stream)
        return MAX_QUEUED if self._ledger.channels.full else 0

    # --- calls and tasks --------------------------------------------------------------------------------

    def _open_calls(self) -> list[Call]:
        """The calls that are not answered yet, also those that wait for something."""
        waiting = (call for call in self._waiting_calls() if call.call not in self._calling.cancelled)
        return [*self._calling.open_calls(), *waiting]

    def _waiting_calls(self) -> Iterator[Call]:
        return (header for _, header in self._dispatch.waiting() if isinstance(header, Call))

    def _cancel(self, header: CancelCall, buffers: Sequence[Fragments]) -> None:
        self._calling.cancel(header, self._waiting_calls())

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- workers and hosts ------------------------------------------------------------------------------

    def _set_up_process(
        self, mesh: int, code: Any = None, bootstrap: Any = None, name: str = "", per_host: int = 0
    ) -> Any:
        monarch, streams = self._monarch, self.streams
        return functools.partial(
            set_up_process,
            *(streams.address, streams.secret, mesh, code, bootstrap, monarch.sync_context, monarch.log_prefix),
            *(monarch.root, name, per_host, self.session),
        )

    def _send_output(self, lines: list[PrintedLine]) -> None:
        self._metrics.printed(len(lines))
        self._log_output(lines)
        folded = fold(lines)
        self.inspection.output.add(folded)
        if self._stream_output or self._ledger.active:
            for part in split_into_messages(folded):
                if self._ledger.active:
                    self._ledger.add_output(part, wanted=self._stream_output)
                else:
                    self.link.send(Output(lines=part))
            self._apply_limits()

    def _process_ended(self, mesh: int, rank: int, pid: int) -> None:
        self._memory.process_ended(mesh, rank)
        if not (self.code.process_ended(mesh, rank) or self._watching.process_ended(mesh, rank, pid)):
            self._supervision.process_ended(mesh, rank, pid)

    def _actors_ended(self, mesh: ActorMesh) -> None:
        self._calling.fail(mesh)
        self._kept.actors_ended(mesh)

    def _process_died(self, procs: ProcMesh, rank: int, report: str) -> None:
        self._reloading.process_died(procs, rank, report)
        self._kept.servers.process_died(procs, rank, report)

    def _process_back(self, procs: ProcMesh, rank: int) -> None:
        self._reloading.process_back(procs, rank)
        self._kept.servers.process_back(procs, rank)

    async def _dump_controllers(self) -> bytes:
        return await self._controllers.dump()

    async def _fetch_kept(self, mesh: int, rank: int, number: int, at: int) -> bytes:
        return await self._kept.fetch(mesh, rank, number, at)

    def _refers(self, mesh: int, rank: int, write: Callable[[bytes], object]) -> ReferringProcess:
        return self._kept.meshes.holders.connected(mesh, rank, write)

    def _process_watched(self, mesh: int, rank: int) -> None:
        self._watching.connected(mesh, rank)

    def _hosts_attached(self, hosts: HostMesh) -> None:
        self.code.hosts_attached(hosts)
        self._telemetry.hosts_attached(hosts)

    def fault(self, fault: Fault) -> None:
        """Monarch reports that actors failed."""
        if address := refusing_address(fault.report):
            self._start_task(self._hosts.refused(address))
        else:
            self._supervision.fault(fault)

    def host_lost(self, host: str, reason: str, *, returns: bool, removed: bool = False, last: bool = False) -> None:
        """The server reports that a host ended: see ``HostWatch.host_lost``. ``last``: the job has no other, and none
        follows."""
        self._supervision.job_lost = last
        self._hosts.host_lost(host, reason, returns=returns, removed=removed)
        self._supervision.host_lost(host)

    def host_back(self, mesh: str, rank: int, host: Host) -> None:
        """The server reports that a lost host restarted, or that ``host`` took its place."""
        self._hosts.host_back(mesh, rank, host)

    def host_ending(self, host: str, reason: str, seconds: float) -> None:
        """The server reports that the cluster is going to end a host; perhaps once more."""
        if self._hosts.host_ending(host, reason, seconds):
            self.notice(f"host {host} will end in {seconds:.0f} s: {reason}")

    def job_ending(self, end: JobEnding) -> None:
        """The server reports that the cluster is going to end the job, or is not any more."""
        self._hosts.job_ending(end.reason, end.seconds)
        if end.notice:
            self.notice(end.notice)

    def notice(self, text: str) -> None:
        """There is a line about the job for the user."""
        if self._ledger.active:
            self._ledger.notify(text)
        else:
            self.link.send(Output(lines=(OutputLine(stream="stderr", mesh="meshgate", text=text),)))

    # --- settings and end -------------------------------------------------------------------------------

    def _holder_changed(self) -> None:
        self._stream_output = True  # until the new holder says otherwise, whatever the earlier one did
        self._kept.meshes.holder_changed(
            self._dispatch.waiting(), self._dispatch.call_after, self._ledger.creations.named
        )

    def _configure(self, header: Configure, buffers: Sequence[Fragments]) -> None:
        self._stream_output = header.stream_output

    async def _configure_monarch(self, header: ConfigureMonarch, buffers: Sequence[Fragments]) -> None:
        """Changes Monarch's settings, and answers with all that are in effect (``meshgate.config``)."""
        in_effect = await self._monarch.configure(header.settings)
        self.link.send(Values(call=header.call), [pickle.dumps(in_effect)])

    async def _end(self, header: EndSession, buffers: Sequence[Fragments]) -> None:
        await self.close("the session ended")
        self.link.send(Done(call=header.call))
        self.link.flush()
        self.ended.set()

    async def _fail(self, reason: str) -> None:
        """Ends the session because no connection can resume it. The server reports the reason to clients."""
        self.end_reason = reason
        await self.close(reason)
        self.ended.set()

    async def close(self, reason: str) -> None:
        """Stops every mesh of the session, and ends the processes that are left.

        Handles no message from now on: a client may have posted calls that would keep this process busy for minutes.
        """
        self._dispatch.close()
        await self._telemetry.close()
        await asyncio.gather(self._lifetimes.stop_all(reason), self.code.close())
        self._channels.close()
        self._ledger.close()
        await self.streams.close()
        self._metrics.close()

    def validate_state(self) -> None:
        """Raises AssertionError if an invariant of the calls does not hold. For tests."""
        self._calling.validate_state()

    def describe(self) -> dict[str, Any]:
        """The session, for the list of sessions."""
        hosts = [known.name for number, known in self._objects.items() if isinstance(known, HostMesh) and number > 0]
        version = self.code.current_version or None
        return {**self._ledger.describe(), "hosts": sorted(set(hosts)), "code_version": version}
