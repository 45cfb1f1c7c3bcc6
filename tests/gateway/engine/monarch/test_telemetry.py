"""The collector of a real root client, in its own process. Sessions use it in tests/end_to_end/test_telemetry.py."""

from __future__ import annotations

import subprocess
import sys

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
    await collector.close()
    print(os.path.exists(collector._directory))
    sys.stdout.flush()
    os._exit(0)  # Monarch would take a second

asyncio.run(main())
"""


def test_a_collector_answers_queries_and_leaves_no_socket() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.splitlines() == [
        "True",
        "0o700",
        "200 application/json {'rows': [{'one': 1}]}",
        "400",
        "(200, 'text/html; charset=utf-8')",
        "False",
    ], done.stderr
