"""What holds for every test: it leaves no process and no thread behind, and nothing in the user's home.

Every process that a test starts inherits a variable which names this run; whoever still carries it when a module
is over has been forgotten. Processes of a fixture that outlives its module carry ``SHARED_VARIABLE`` too; those are
looked at when the whole run is over.
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from meshgate.jobs.processes import ProcessName, marked

RUN_VARIABLE = "MESHGATE_TEST_RUN"
SHARED_VARIABLE = "MESHGATE_TEST_SHARED"
ENDING = 10.0  # seconds that what a test has ended may take to be gone
NO_CLUSTER = "KUBECONFIG names no cluster: the tests that need one (-m kubernetes) are left out"

_run = uuid.uuid4().hex

# How long an example takes says nothing on a machine that runs other things.
hypothesis.settings.register_profile("meshgate", deadline=None)
hypothesis.settings.load_profile("meshgate")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[RUN_VARIABLE] = _run
    for variable in ("MESHGATE_URL", "MESHGATE_TOKEN", "KT_API_URL"):
        os.environ.pop(variable, None)


@pytest.hookimpl(trylast=True)  # after the marks are all there
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("KUBECONFIG"):
        return
    left_out = [item for item in items if item.get_closest_marker("kubernetes")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_report_header() -> str:
    cluster = os.environ.get("KUBECONFIG")
    return f"cluster: {cluster}" if cluster else NO_CLUSTER


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not os.environ.get("KUBECONFIG"):
        terminalreporter.write_line(NO_CLUSTER)


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what jobs write down about themselves out of the user's own list of jobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_process_after_the_run() -> Iterator[None]:
    yield
    _require_none(_forgotten(shared=True), "this run")


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    threads = set(threading.enumerate())
    yield
    _require_none(_forgotten(shared=False), request.node.nodeid)
    for thread in set(threading.enumerate()) - threads:
        if thread.name.startswith("meshgate"):
            thread.join(ENDING)
            assert not thread.is_alive(), f"{request.node.nodeid} left the thread {thread.name!r} behind"


def _forgotten(*, shared: bool) -> list[ProcessName]:
    found = marked(RUN_VARIABLE, _run)
    if shared:
        return found
    kept = set(marked(SHARED_VARIABLE, "1"))
    return [process for process in found if process not in kept]


def _require_none(processes: list[ProcessName], who: str) -> None:
    """Fails naming what is left; each gets a moment to be gone, and is killed if it is not."""
    left = []
    for process in processes:
        command = _command(process.pid)
        if not process.wait_ended(ENDING):
            left.append(f"{process.pid}: {command}")
            process.signal(signal.SIGKILL)
    assert not left, f"{who} left processes behind:\n" + "\n".join(left)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "(gone)"
