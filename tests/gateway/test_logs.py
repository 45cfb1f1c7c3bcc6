from __future__ import annotations

import json
import subprocess
import sys

import pytest

from meshgate_gateway.logs import Redactor

SECRET = "correct-horse-battery-staple"

PROGRAM = """
import asyncio, logging, sys, structlog
from meshgate_gateway.logs import configure_logs
configure_logs("info", sys.argv[1], [sys.argv[2]])
log = structlog.get_logger().bind(session="abc")
log.debug("not told")
log.info("two\\nlines", output="a b\\nc", token="anything", seconds=1.5)
try:
    raise ValueError(f"holds {sys.argv[2]}")
except ValueError:
    log.exception("failed")
    logging.getLogger("asyncio").exception("from elsewhere")
"""


def logged(form: str) -> list[str]:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, form, SECRET], capture_output=True, text=True, check=True)
    assert ran.stdout == ""
    return ran.stderr.splitlines()


def test_every_event_is_one_json_object_on_one_line() -> None:
    first, failed, elsewhere = (json.loads(line) for line in logged("json"))
    assert first["event"] == "two\nlines"
    assert (first["session"], first["level"], first["seconds"]) == ("abc", "info", 1.5)
    assert first["timestamp"].endswith("Z")
    assert "ValueError" in failed["exception"]
    assert elsewhere["event"] == "from elsewhere"


def test_every_event_is_one_line_of_text() -> None:
    first, failed, elsewhere = logged("text")
    assert "two\\nlines" in first
    assert 'output="a b\\nc"' in first
    assert "ValueError" in failed
    assert "from elsewhere" in elsewhere


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_secret_shows_nowhere_not_even_in_a_traceback(form: str) -> None:
    told = "\n".join(logged(form))
    assert SECRET not in told
    assert "anything" not in told
    assert "holds [redacted]" in told


def test_redaction_looks_at_keys_values_and_whatever_is_nested() -> None:
    event = {
        "event": f"a {SECRET} b",
        "nested": {"list": [SECRET, {"deep": (SECRET, 1)}], SECRET: 2},
        "object": ValueError(SECRET),
        "header": "authorization: BEARER abc.def-123, next",
        "Authorization": "Basic xyz",
        "count": 3,
        "nothing": None,
    }
    redacted = Redactor([SECRET])(None, "info", event)
    assert SECRET not in repr(redacted)
    assert "abc.def-123" not in repr(redacted)
    assert redacted["header"] == "authorization: BEARER [redacted] next"
    assert redacted["Authorization"] == "[redacted]"
    assert (redacted["count"], redacted["nothing"]) == (3, None)
