"""Takes the place of Monarch's conftest.py beside a copy of its tests.

Writes each result to the file that the runner names, as it comes: the process may end with a later test.
"""

import functools
import json
import os
import sys
import time

import pytest

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the processes of actors import the tests' modules
REPORT = os.environ["MESHGATE_CONFORMANCE_REPORT"]
began = {}


def in_this_process(test=None, *, env=None):
    """Monarch's decorator isolate_in_subprocess, for tests that run together: a process for each takes long. A test
    that needs one fails, runs again alone, and then gets it.
    """
    if test is None:
        return functools.partial(in_this_process, env=env)
    return isolate(test, env=env) if env else test


if os.environ.get("MESHGATE_CONFORMANCE_TOGETHER"):
    try:
        import isolate_in_subprocess
    except ModuleNotFoundError:
        """Tests of another release do without it."""
    else:
        isolate = isolate_in_subprocess.isolate_in_subprocess
        isolate_in_subprocess.isolate_in_subprocess = in_this_process


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.addinivalue_line("markers", "oss_skip: Monarch's own CI leaves it out")


def pytest_collection_modifyitems(items):
    """Removes the tests' own limits of seconds: pytest.ini has one for all, which suits a busy machine."""
    for item in items:
        for node in item.listchain():
            node.own_markers[:] = [mark for mark in node.own_markers if mark.name != "timeout"]


def pytest_collectreport(report):
    if report.failed:
        write("collect", "failed", str(report.longrepr))


def pytest_runtest_logstart(nodeid):
    began[nodeid] = time.monotonic()
    write("start", "", "", nodeid)


def pytest_runtest_logreport(report):
    if report.failed or report.skipped:
        why = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        write(report.when, report.outcome, why, report.nodeid)


def pytest_runtest_logfinish(nodeid):
    write("finish", "", "", nodeid)


def write(when, outcome, error, nodeid=""):
    seconds = time.monotonic() - began.get(nodeid, time.monotonic())
    entry = {"id": nodeid, "when": when, "outcome": outcome, "error": error, "seconds": seconds, "pid": os.getpid()}
    with open(REPORT, "a") as file:
        file.write(json.dumps(entry) + "\n")
