"""Checks of every test: it leaves no process or thread behind, nothing in the user's home, and uses no cluster unasked.

Processes that a test starts inherit a variable with the id of this run. A process that still has it at the end of a
module has leaked. Processes of fixtures that outlive their module have ``SHARED_VARIABLE`` as well and are checked at
the end of the run.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

import meshgate
from meshgate.session.errors.faults import write_fault
from meshgate_processes.identity import ProcessIdentity, wait_ended
from meshgate_processes.marks import find_processes
from tests.certificates import OPENSSL
from tests.chart import HELM
from tests.chromium import CHROMIUM
from tests.order import slow_first
from tests.waiting import Printed, run_alone

RUN_VARIABLE = "MESHGATE_TEST_RUN"
SHARED_VARIABLE = "MESHGATE_TEST_SHARED"
EXIT_TIMEOUT = 60.0  # seconds that a process may take to exit after its test
CLUSTERS = {  # marker: the variable that names the cluster
    "kubernetes": "KUBECONFIG",
    "slurm": "SLURM_CONF",
    "docker": "DOCKER_HOST",
}
# Variables of the user's shell or of a git hook that would change what programs do in tests, and those that tests need.
SET_ASIDE = re.compile(
    r"(GIT|HYPERACTOR|KT|MESHGATE|MONARCH|SLURM)_.*|KUBERNETES_SERVICE_HOST|(FORCE|NO)_COLOR|(?i:.*_proxy)"
)
KEPT = re.compile(r"MESHGATE_TEST_.*|MESHGATE_.*_(IMAGE|UP)|SLURM_CONF")
SLURM_COMMANDS = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
UNASKED = """#!/bin/sh
echo "$0 $*" >>"$(dirname "$0")/called"
echo "$0: this test does not have the mark slurm" >&2
exit 1
"""

LEFT_OUT = {  # what is not installed: which tests are left out without it, and how to install it
    "torch": "process groups and distributed training; make torch installs it",
    "ray": "the programs before a migration from Ray; make bench installs it",
    "chromium": "the page of meshgate ui, and notebooks in JupyterLab",
    "jupyterlab": "notebooks in JupyterLab; make setup installs it",
    "helm": "the Helm chart; make setup installs it on Linux with x86-64",
    "openssl": "private certificates",
}
LAST_RUN = "meshgate/last_run"  # in pytest's cache: the seconds of the last whole run, and the cores it had
USUAL_RUN = "10 to 15 minutes on 2 cores, less on more"

collect_ignore = ["conformance/upstream/driver"]  # its conftest.py is for copies of Monarch's own tests

_run = uuid.uuid4().hex

# Containers often set PYTHONDONTWRITEBYTECODE. Each run would then compile the tests again (16 s of processor time for
# each worker) and hypothesis (1 s), whose assertions pytest rewrites too, and each engine of a test the product. Tests
# that edit modules run as the environment says.
_dont_write_bytecode = sys.dont_write_bytecode
sys.dont_write_bytecode = False


def pytest_configure(config: pytest.Config) -> None:
    import hypothesis  # not above, where Python may still not write what it compiles

    # Deadlines fail at random on a machine that runs other things.
    hypothesis.settings.register_profile("meshgate", deadline=None)
    hypothesis.settings.load_profile("meshgate")
    meshgate.unhandled_fault_hook = write_fault  # the default one would end this run
    # A shell runs commands in the background with SIGINT ignored, and nohup runs them with SIGHUP ignored, which
    # programs that tests interrupt would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # a program does not inherit a handler
    os.environ[RUN_VARIABLE] = _run
    if proxy := os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        os.environ.setdefault("PIP_PROXY", proxy)  # for the tests that install packages
    for variable in list(os.environ):
        if SET_ASIDE.fullmatch(variable) and not KEPT.fullmatch(variable):
            del os.environ[variable]
    # Whether an engine starts so late that its session reports it, on stderr and from a thread, is up to the machine.
    os.environ["MESHGATE_QUIET"] = "110"


@pytest.hookimpl(trylast=True)  # after all markers have been added
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = [marker for marker, variable in CLUSTERS.items() if not os.environ.get(variable)]
    left_out = [item for item in items if any(item.get_closest_marker(marker) for marker in missing)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        items[:] = slow_first(
            items, lambda item: item.get_closest_marker("slow") is not None, lambda item: item.path, workers
        )


@pytest.hookimpl(optionalhook=True)  # so that tests run without xdist too
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For ``-n auto``. More than cores, because for a third of the time the tests wait for processes."""
    return max(2, _cores() * 3 // 2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # it takes a sixth of the time of the collection, and finds little: all tests stay until the end
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = _dont_write_bytecode
        gc.freeze()  # a garbage collection would take 0.3 s to traverse them
        gc.enable()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """A test that is a coroutine function runs in an event loop of its own."""
    if inspect.iscoroutinefunction(test := pyfuncitem.obj):
        pyfuncitem.obj = functools.wraps(test)(lambda **arguments: run_alone(test(**arguments)))


def pytest_report_header(config: pytest.Config) -> list[str]:
    clusters = [_cluster_line(marker) for marker in CLUSTERS]
    if not _is_whole_run(config):
        return clusters
    last = config.cache.get(LAST_RUN, None) if config.cache else None
    took = f"the last run took {last['seconds']} s on {last['cores']} cores" if last else USUAL_RUN
    return [f"all tests: {took}", *clusters, *_not_installed()]


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_started] = time.monotonic()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and _is_whole_run(session.config) and session.config.cache:
        seconds = round(time.monotonic() - session.config.stash[_started])
        session.config.cache.set(LAST_RUN, {"seconds": seconds, "cores": _cores()})


_started = pytest.StashKey[float]()


def _is_whole_run(config: pytest.Config) -> bool:
    """Whether this is ``make test`` without arguments, and not one of its workers."""
    option = config.option
    chosen = option.keyword or option.markexpr or option.collectonly or getattr(option, "lf", False)
    from_settings = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return from_settings and not chosen and not hasattr(config, "workerinput")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _not_installed() -> list[str]:
    found = {
        "torch": importlib.util.find_spec("torch"),
        "ray": importlib.util.find_spec("ray") or Path(".venv-bench").exists(),
        "chromium": CHROMIUM,
        "jupyterlab": importlib.util.find_spec("jupyterlab"),
        "helm": HELM,
        "openssl": OPENSSL,
    }
    return [f"{name} is not installed: leaving out {LEFT_OUT[name]}" for name in LEFT_OUT if not found[name]]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for marker, variable in CLUSTERS.items():
        if not os.environ.get(variable):
            terminalreporter.write_line(_cluster_line(marker))


def _cluster_line(marker: str) -> str:
    variable = CLUSTERS[marker]
    cluster = os.environ.get(variable)
    if cluster:
        return f"{marker}: {cluster}"
    return f"{variable} is not set: skipping the tests that need it (-m {marker})"


@pytest.fixture(scope="session", autouse=True)
def _nothing_in_the_users_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's own list of jobs and synced files stay as they are, and tests do not find those of other runs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("state", "cache"):
            patch.setenv(f"XDG_{name.upper()}_HOME", str(tmp_path_factory.mktemp(name)))
        yield


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    return Printed()


@pytest.fixture(scope="session")
def _slurm_unasked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commands of Slurm's that fail, and write into the file ``called`` that they were called."""
    directory = tmp_path_factory.mktemp("slurm_unasked")
    for name in SLURM_COMMANDS:
        (directory / name).write_text(UNASKED)
        (directory / name).chmod(0o755)
    return directory


@pytest.fixture(autouse=True)
def _only_the_clusters_of_its_marks(request: pytest.FixtureRequest, _slurm_unasked: Path) -> Iterator[None]:
    """A test without a cluster's mark passes or fails alike on machines with and without that cluster."""
    called = _slurm_unasked / "called"
    with pytest.MonkeyPatch.context() as patch:
        for marker, variable in CLUSTERS.items():
            if request.node.get_closest_marker(marker) is None:
                patch.delenv(variable, raising=False)
        if request.node.get_closest_marker("slurm") is None:
            patch.setenv("PATH", str(_slurm_unasked), prepend=os.pathsep)
        yield
    if called.exists():
        text = called.read_text()
        called.unlink()
        pytest.fail(f"this test calls Slurm without the mark slurm:\n{text}")


@pytest.fixture(scope="session", autouse=True)
def _no_leaked_processes_in_the_run() -> Iterator[None]:
    yield
    _fail_if_any(_leaked(shared=True), "this run")


@pytest.fixture(scope="session", autouse=True)
def _no_job_file_in_the_clone() -> Iterator[None]:
    """Commands of other tests would find the job while it runs."""
    directory = Path(__file__).parents[1] / ".monarch"
    before = directory.exists()
    yield
    assert before or not directory.exists(), f"a test saved a job in {directory}: pass cached_path=None to its state()"


@pytest.fixture(scope="module", autouse=True)
def _no_leaks_in_the_module(request: pytest.FixtureRequest) -> Iterator[None]:
    threads = set(threading.enumerate())
    yield
    _fail_if_any(_leaked(shared=False), request.node.nodeid)
    for thread in set(threading.enumerate()) - threads:
        if thread.name.startswith("meshgate"):
            thread.join(EXIT_TIMEOUT)
            assert not thread.is_alive(), f"{request.node.nodeid} left the thread {thread.name!r} behind"


def _leaked(*, shared: bool) -> list[ProcessIdentity]:
    found = find_processes(f"{RUN_VARIABLE}={_run}")
    if shared or not found:
        return found
    kept = set(find_processes(f"{SHARED_VARIABLE}=1"))
    return [process for process in found if process not in kept]


def _fail_if_any(processes: list[ProcessIdentity], where: str) -> None:
    """Fails if processes are still running after ``EXIT_TIMEOUT``, and kills them."""
    commands = {process: _command(process.pid) for process in processes}
    left = []
    for process in wait_ended(processes, EXIT_TIMEOUT):
        left.append(f"{process.pid}: {commands[process]}")
        process.signal(signal.SIGKILL)
    assert not left, f"{where} left processes behind:\n" + "\n".join(left)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "(gone)"
