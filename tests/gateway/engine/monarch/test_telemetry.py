"""The collector of a real root client, in its own process. Sessions use it in tests/end_to_end/test_telemetry.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, json, os, sys
import monarch.actor as api
from meshgate_gateway.engine.monarch.telemetry import Collector

async def main():
    instance = api.context().actor_instance
    collector = Collector(instance, 60)
    await collector.start()
    print(os.path.exists(os.path.join(collector._directory, "telemetry.sock")))
    print(oct(os.stat(collector._directory).st_mode & 0o777))
    status, kind, body = await collector.request("/api/query", json.dumps({"sql": "SELECT 1 AS one"}).encode())
    print(status, kind, json.loads(body))
    print((await collector.request("/api/query", b"{}"))[0])
    print((await collector.request("/", None))[:2])
    print((await collector.request("/api/pyspy_dump", b"{}"))[0])
    for sql in json.loads(sys.argv[1]):
        status, kind, body = await collector.request("/api/query", json.dumps({"sql": sql}).encode())
        print(status, "rows" if status == 200 else json.loads(body)["error"].partition(":")[0])
    await collector.close()
    print(os.path.exists(collector._directory))
    sys.stdout.flush()
    os._exit(0)  # Monarch would take a second

asyncio.run(main())
"""


READS = [
    "SHOW TABLES",
    "describe actors",
    "VALUES (1)",
    " (SELECT 'a\nCopyTo: b' FROM actors)\nUNION SELECT 'c' ORDER BY 1 LIMIT 2",
    "WITH RECURSIVE n AS (SELECT 1 AS a UNION ALL SELECT a + 1 FROM n WHERE a < 3) SELECT DISTINCT a FROM n",
    "SELECT a.id FROM actors a LEFT JOIN meshes m ON a.mesh_id = m.id WHERE a.id IN (SELECT max(id) FROM actors)",
]
OTHERS = [
    "CREATE EXTERNAL TABLE t STORED AS CSV LOCATION '{file}'",
    "COPY (SELECT 1) TO '{folder}/written.csv'",
    "-- a comment\nCOPY (SELECT 1) TO '{folder}/written.csv'",
    "ANALYZE COPY (SELECT 1) TO '{folder}/written.csv'",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{folder}/written.csv'",
    "DROP TABLE actors",
    "SELECT 1 AS one INTO made",
    "INSERT INTO actors SELECT * FROM actors",
    "SET datafusion.execution.batch_size = 1",
    "",
]
INVALID = [
    "SELECT 1; COPY (SELECT 1) TO '{folder}/written.csv'",
    "SELECT * FROM '{file}'",
    "SELECT * FROM (SELECT 1 AS one INTO made) AS x",
    "SELECT * FROM made",
    "WITH x AS (SELECT 1) INSERT INTO actors SELECT * FROM x",
]


@pytest.mark.timeout(600)  # Monarch, the dashboard and pyarrow start
def test_a_collector_answers_queries_that_only_read_and_leaves_no_socket(tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("secret\n1\n")
    asked = json.dumps([sql.format(folder=tmp_path, file=secret) for sql in (*READS, *OTHERS, *INVALID)])
    program = [sys.executable, "-c", PROGRAM, asked]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    answers = done.stdout.splitlines()[6:-1]
    assert answers[: len(READS)] == ["200 rows"] * len(READS)
    refused = answers[len(READS) :]
    assert refused[: len(OTHERS)] == ["400 telemetry can only be read"] * len(OTHERS)
    assert [answer[:4] for answer in refused[len(OTHERS) :]] == ["400 "] * len(INVALID)
    assert os.listdir(tmp_path) == [secret.name]
    assert [*done.stdout.splitlines()[:6], done.stdout.splitlines()[-1]] == [
        "True",
        "0o700",
        "200 application/json {'rows': [{'one': 1}]}",
        "400",
        "(200, 'text/html; charset=utf-8')",
        "403",
        "False",
    ], done.stderr
