"""Asks the engines what they know about their sessions, for ``GET /v1/status`` and ``GET /v1/output``.

Nothing here changes a session. An engine that does not answer in time is reported as such.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping
from typing import Literal, Protocol, TypeVar

import async_timeout
from pydantic import BaseModel

from meshgate_gateway.control.messages import ControlMessage, Inspect, Inspected
from meshgate_gateway.hosts.provider import HostProvider
from meshgate_gateway.sessions.session_table import Sessions
from meshgate_wire.handshake import PYTHON_VERSION, SOFTWARE_VERSION
from meshgate_wire.status import EngineStatus, HostStatus, JobStatus, OutputPage, SessionOutput, SessionStatus

TIMEOUT = 3.0  # seconds that an engine has to answer
What = Literal["status", "output"]
M = TypeVar("M", bound=BaseModel)


class Engine(Protocol):
    @property
    def pid(self) -> int: ...

    def send(self, message: ControlMessage) -> bool: ...


class Inspection:
    """``engines`` are the running engines by session."""

    def __init__(self, sessions: Sessions, engines: Mapping[str, Engine], hosts: HostProvider) -> None:
        self._sessions, self._engines, self._hosts = sessions, engines, hosts
        self._numbers = itertools.count(secrets.randbits(32))  # an answer to an earlier server must not be taken
        self._waiting: dict[int, tuple[list[str], asyncio.Future[str]]] = {}

    async def status(self) -> JobStatus:
        engines = dict(self._engines)
        sessions = await asyncio.gather(*(self._session(session, engine) for session, engine in engines.items()))
        meshes = dict(self._hosts.meshes())
        present = tuple(
            HostStatus(mesh=mesh, rank=rank, name=host.name)
            for mesh in meshes
            for rank, host in enumerate(self._hosts.present(mesh))
        )
        return JobStatus(
            gateway_version=SOFTWARE_VERSION,
            python=PYTHON_VERSION,
            meshes=meshes,
            hosts=present,
            sessions=tuple(sessions),
        )

    async def output(self, after: Mapping[str, int]) -> OutputPage:
        """What was printed in each session after the line numbered ``after[session]``."""
        engines = dict(self._engines)
        pages = await asyncio.gather(*(self._output(each, engine, after) for each, engine in engines.items()))
        return OutputPage(sessions=tuple(page for page in pages if page is not None))

    def received(self, message: Inspected) -> None:
        """Takes a part of an answer. A late one is dropped."""
        parts, answer = self._waiting.get(message.request, (None, None))
        if parts is None or answer is None:
            return
        parts.append(message.body)
        if not message.more and not answer.done():
            answer.set_result("".join(parts))

    async def _session(self, session: str, engine: Engine) -> SessionStatus:
        facts = {
            "session": session,
            "owner": self._sessions.owner_of(session),
            "connected": self._sessions.is_connected(session),
            "pid": engine.pid,
        }
        try:
            known = await self._ask(engine, "status", EngineStatus)
        except asyncio.TimeoutError:
            return SessionStatus.model_validate({**facts, "problem": f"its engine did not answer within {TIMEOUT:g} s"})
        return SessionStatus.model_validate({**facts, **known.model_dump()})

    async def _output(self, session: str, engine: Engine, after: Mapping[str, int]) -> SessionOutput | None:
        try:
            found = await self._ask(engine, "output", SessionOutput, after.get(session, 0))
        except asyncio.TimeoutError:
            return None
        return found.model_copy(update={"session": session})

    async def _ask(self, engine: Engine, what: What, model: type[M], after: int = 0) -> M:
        number = next(self._numbers)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[number] = ([], answer)
        try:
            engine.send(Inspect(request=number, what=what, after=after))
            async with async_timeout.timeout(TIMEOUT):
                return model.model_validate_json(await answer)
        finally:
            del self._waiting[number]
