from __future__ import annotations

import json
import subprocess
import sys

import pytest

from meshgate_gateway.logs import EventFormatter

SECRET = "correct-horse-battery-staple"

PROGRAM = """
import asyncio, logging, sys
from meshgate_gateway.logs import configure_logs, EventLog
configure_logs("info", sys.argv[1], [sys.argv[2]])
log = EventLog().bind(session="abc")
log.debug("below the level")
log.info("two\\nlines", output="a b\\nc", token="anything", seconds=1.5)
try:
    raise ValueError(f"holds {sys.argv[2]}")
except ValueError:
    log.exception("failed")
    logging.getLogger("asyncio").exception("from asyncio")
"""


def logged(form: str) -> list[str]:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, form, SECRET], capture_output=True, text=True, check=True)
    assert ran.stdout == ""
    return ran.stderr.splitlines()


def test_every_event_is_one_json_object_on_one_line() -> None:
    first, failed, record = (json.loads(line) for line in logged("json"))
    assert first["event"] == "two\nlines"
    assert (first["session"], first["level"], first["seconds"]) == ("abc", "info", 1.5)
    assert first["timestamp"].endswith("Z")
    assert "ValueError" in failed["exception"]
    assert record["event"] == "from asyncio"


def test_every_event_is_one_line_of_text() -> None:
    first, failed, record = logged("text")
    assert "two\\nlines" in first
    assert 'output="a b\\nc"' in first
    assert "ValueError" in failed
    assert "from asyncio" in record


@pytest.mark.parametrize("form", ["json", "text"])
def test_secrets_are_redacted_even_in_tracebacks(form: str) -> None:
    output = "\n".join(logged(form))
    assert SECRET not in output
    assert "anything" not in output
    assert "holds [redacted]" in output


FAILING_STREAMS = {
    "full disk": "sys.stderr = open('/dev/full', 'w')",
    "closed": "sys.stderr.close()",
    "closed descriptor": "os.close(2)",
}
PROGRAM_WITHOUT_LOG = """
import logging, os, sys
from meshgate_gateway.logs import configure_logs, EventLog
{break_stderr}
configure_logs("info", "{form}", [])
class Unprintable:
    def __repr__(self):
        raise RuntimeError
log = EventLog()
for _ in range(3):
    log.info("an event", output="x" * 100_000)
    log.info("an event", value=Unprintable())
    try:
        raise ValueError
    except ValueError:
        log.exception("failed")
        logging.getLogger("asyncio").exception("from asyncio: %s", "x" * 100_000)
print("still running", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize("stream", FAILING_STREAMS)
def test_a_log_that_cannot_be_written_does_not_raise(stream: str, form: str) -> None:
    program = PROGRAM_WITHOUT_LOG.format(break_stderr=FAILING_STREAMS[stream], form=form)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.returncode) == ("still running\n", 0), ran.stderr


def test_redaction_covers_keys_values_and_nested_objects() -> None:
    event = {
        "event": f"a {SECRET} b",
        "nested": {"list": [SECRET, {"deep": (SECRET, 1)}], SECRET: 2},
        "object": ValueError(SECRET),
        "header": "authorization: BEARER abc.def-123, next",
        "Authorization": "Basic xyz",
        "count": 3,
        "nothing": None,
    }
    redacted = EventFormatter("text", [SECRET]).redact(event)
    assert SECRET not in repr(redacted)
    assert "abc.def-123" not in repr(redacted)
    assert redacted["header"] == "authorization: BEARER [redacted] next"
    assert redacted["Authorization"] == "[redacted]"
    assert (redacted["count"], redacted["nothing"]) == (3, None)
