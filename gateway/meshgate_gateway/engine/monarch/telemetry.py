"""Monarch's telemetry of one session, without the process beside the client in which Monarch's own jobs keep it.

Each process writes what it records to a socket of its host, and a collector on that host reads it. The collector of
this process's host is in this process. It also answers queries, which it passes on to the collectors of other hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import secrets
import shutil
from collections.abc import Callable
from typing import Any

import async_timeout

STOP_TIMEOUT = 5.0  # seconds for the collectors of other hosts to stop
QUERY_PATH = "/api/query"
READING_WORDS = ("SELECT", "WITH", "VALUES", "SHOW", "DESCRIBE")
# The nodes that the plan of a reading statement can begin with, as DataFusion's logical plans name them. Others write
# files (CopyTo), make tables of files (CreateExternalTable), drop them or change settings.
READING_NODES = frozenset(
    {"Projection", "Filter", "WindowAggr", "Aggregate", "Sort", "Join", "Repartition", "Union", "TableScan", "Limit"}
    | {"EmptyRelation", "Subquery", "SubqueryAlias", "Distinct", "DistinctOn", "Values", "Unnest", "RecursiveQuery"}
    | {"DescribeTable"}
)


class Collector:
    """Create it before hosts are attached to, so that their processes write to its socket. ``instance`` is the root
    client's. ``retention`` is for how many seconds messages and traces are kept; 0: for as long as the session lasts.
    ``intervals`` are those of hosts and GPUs, in seconds, where Monarch samples them.
    """

    def __init__(self, instance: Any, retention: int, *intervals: float) -> None:
        from monarch._rust_bindings import monarch_distributed_telemetry as native  # noqa: PLC0415
        from monarch._src.actor.proc_mesh import SetupActor  # noqa: PLC0415 - loaded once Monarch is
        from monarch._src.job.telemetry_actor import (  # noqa: PLC0415
            TelemetryActor,
            telemetry_socket_dir,
            telemetry_socket_path,
        )

        name = secrets.token_hex(8)
        self._directory = telemetry_socket_dir(name)
        self._connect = functools.partial(native._set_unix_socket_sink_path, telemetry_socket_path(name))
        self._spawned = SetupActor.register_startup_function
        self._actor = instance.proc_mesh.spawn("telemetry", TelemetryActor, name, retention, *intervals)
        self._site: asyncio.Future[Any] | None = None

    async def start(self) -> None:
        """Raises RuntimeError if the socket cannot be opened."""
        if not await self._actor.activate.call_one():
            raise RuntimeError(f"Monarch's collector cannot open its socket in {self._directory}")
        self._connect()
        self._spawned(lambda: self._connect)
        self._site = asyncio.ensure_future(asyncio.to_thread(_make_site, self._actor))

    async def collect_from(self, hosts: Any) -> None:
        """Starts a collector on each of ``hosts``. A host without one is missing from the results of queries."""
        await self._actor.start_worker_collector.call_one(hosts, True)

    async def request(self, path: str, body: bytes | None) -> tuple[int, str, bytes]:
        """The status, content type and body with which Monarch's dashboard answers GET, or POST of JSON ``body``.

        Only queries are posted: the site's other POST requests write to its tables, or send requests elsewhere."""
        assert self._site is not None
        if body is not None and path != QUERY_PATH:
            return 403, "application/json", b'{"error": "telemetry can only be read: only queries are accepted"}'
        client = (await asyncio.shield(self._site)).test_client()

        def answer() -> tuple[int, str, bytes]:
            method = "GET" if body is None else "POST"
            answered = client.open(path, method=method, data=body, content_type="application/json")
            return answered.status_code, answered.headers.get("Content-Type", ""), answered.get_data()

        return await asyncio.to_thread(answer)

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # their processes end with the session's hosts in any case
            async with async_timeout.timeout(STOP_TIMEOUT):
                await self._actor.stop_worker_collectors.call_one()
        shutil.rmtree(self._directory, ignore_errors=True)


def _make_site(actor: Any) -> Any:
    """Monarch's dashboard, a WSGI application that nothing serves: it has no password."""
    from monarch.distributed_telemetry.engine import QueryEngine  # noqa: PLC0415 - it imports pyarrow
    from monarch.monarch_dashboard.server.app import create_app  # noqa: PLC0415
    from monarch.monarch_dashboard.server.query_engine_adapter import QueryEngineAdapter  # noqa: PLC0415

    class ReadingEngine(QueryEngine):  # type: ignore[misc]
        """Monarch's executes any statement, such as one that reads or writes files of this process's user."""

        def query_stream(self, sql: str) -> Any:
            run = super().query_stream
            require_reading(sql, lambda explain: run(explain).read_all().to_pylist())
            return run(sql)

    engine = ReadingEngine(actor)
    engine.query("SELECT 1")  # the first one prepares the tables, which takes seconds
    return create_app(QueryEngineAdapter(engine))


def require_reading(sql: str, run: Callable[[str], list[dict[str, Any]]]) -> None:
    """Raises ValueError unless ``sql`` only reads the engine's tables. ``run(sql)`` are the rows of a result.

    The engine's own parser decides, which accepts one statement at a time and knows no tables but Monarch's and their
    descriptions: it explains the statement without executing it. The first word must be one of few, because another
    could belong to EXPLAIN itself, whose ANALYZE executes.
    """
    word = re.match(r"[\s(]*([A-Za-z]+)", sql)
    if word is not None and word[1].upper() in READING_WORDS:
        plans = [row["plan"] for row in run(f"EXPLAIN FORMAT INDENT {sql}") if row["plan_type"] == "logical_plan"]
        if len(plans) == 1 and _root(plans[0]) in READING_NODES:
            return
    raise ValueError(
        f"telemetry can only be read: expected one statement that begins with {', '.join(READING_WORDS)}, and that "
        "creates and writes nothing"
    )


def _root(plan: str) -> str:
    """The kind of a plan's first node, such as Join of ``LeftSemi Join: …``."""
    return re.split(r"[:(\n]", plan)[0].split()[-1]
