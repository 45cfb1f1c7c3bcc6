from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from meshgate.ranks.processes import siblings
from meshgate.ranks.usage_on_host import read_stat
from meshgate_gateway.engine.on_worker.process import descendants
from meshgate_gateway.runs import limits
from meshgate_processes.identity import ProcessIdentity, exit_text, identify_process, last_output
from meshgate_processes.marks import find_processes

WAIT = "import sys; sys.stdin.read()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until its input is closed."""
    with subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE) as process:
        yield process


def identify(pid: int) -> ProcessIdentity:
    process = identify_process(pid)
    assert process is not None
    return process


def test_a_process_keeps_its_identity_while_it_runs(child: subprocess.Popen[bytes]) -> None:
    assert identify(child.pid) == identify(child.pid)
    assert identify(child.pid).alive
    assert identify(child.pid) != identify(os.getpid())


@pytest.mark.skipif(sys.platform != "linux", reason="the names of processes are read through /proc")
def test_a_process_whose_name_is_not_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel cuts names after 15 bytes, even within a character."""
    rename = (
        "open('/proc/self/comm', 'wb').write('\N{GREEK SMALL LETTER ALPHA}'.encode() * 8); print(flush=True); " + WAIT
    )
    mark = f"MARKED={uuid.uuid4().hex}"
    environment = {**os.environ, "MARKED": mark.partition("=")[2]}
    command = [sys.executable, "-c", rename]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert identify(child.pid).alive
        assert [process.pid for process in find_processes(mark)] == [child.pid]
        assert find_processes(f"{mark}0") == []
        assert child.pid in descendants(os.getpid())
        assert child.pid in limits.descendants(os.getpid())
        assert read_stat(child.pid) is not None
        monkeypatch.setattr(os, "getppid", os.getpid)  # as if this process were the host
        assert child.pid in siblings()


def test_a_zombie_has_ended(child: subprocess.Popen[bytes]) -> None:
    process = identify(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.alive
    assert identify_process(child.pid) is None
    assert process.wait_ended(0)


def test_a_process_with_a_reused_pid_is_not_signalled(child: subprocess.Popen[bytes]) -> None:
    ended = ProcessIdentity(child.pid, "another boot/1")
    assert not ended.alive
    ended.signal(signal.SIGKILL)
    assert ended.wait_ended(0)
    assert child.poll() is None


def test_waiting_returns_when_the_process_ends(child: subprocess.Popen[bytes]) -> None:
    process = identify(child.pid)
    assert not process.wait_ended(0)
    process.signal(signal.SIGTERM)
    assert process.wait_ended(30)


def elsewhere(**changed: str) -> ProcessIdentity:
    """This process, as if other parts of its place were these."""
    own = identify(os.getpid())
    parts = dict(zip(("machine", "boot", "namespace", "time"), own.started.split("/"), strict=True))
    return ProcessIdentity(own.pid, "/".join({**parts, **changed}.values()))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell no pid namespaces apart")
@pytest.mark.parametrize(
    ("changed", "foreign"),
    [
        ({}, False),
        ({"time": "1"}, False),  # the pid was reused
        ({"machine": "old-name:0"}, False),  # renamed since
        ({"boot": "earlier"}, False),  # this machine has been restarted, so its containers have, too
        ({"boot": "earlier", "namespace": "2"}, False),
        ({"namespace": "2"}, True),  # a container of this machine
        ({"machine": "login2:0", "boot": "another"}, True),
    ],
)
def test_a_process_of_another_machine_or_container_is_not_judged_by_its_pid(
    changed: dict[str, str], foreign: bool
) -> None:
    process = elsewhere(**changed)
    assert process.foreign == foreign
    assert process.alive == (set(changed) <= {"machine"})
    assert process.ended == (not foreign and not process.alive)
    assert process.machine == changed.get("machine", process.started).partition(":")[0]


def test_an_identity_without_a_place_is_one_of_this_machine() -> None:
    assert ProcessIdentity(os.getpid(), "before").ended
    assert ProcessIdentity(os.getpid(), "").machine == ""


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root to make a pid namespace")
def test_another_pid_namespace_cannot_judge_this_process() -> None:
    program = (
        "import sys\nfrom meshgate_processes.identity import ProcessIdentity\n"
        "found = ProcessIdentity(int(sys.argv[1]), sys.argv[2])\nprint(found.alive, found.ended, found.foreign)"
    )
    own = identify(os.getpid())
    assert own.alive
    separate = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*separate, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this container may not make a pid namespace")
    command = [*separate, sys.executable, "-c", program, str(own.pid), own.started]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False False True\n"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-200, "was killed by signal 200"),
    ],
)
def test_the_text_of_an_exit_names_the_code_or_the_signal(code: int, text: str) -> None:
    assert exit_text(code) == text
    assert exit_text(code, exited="failed with") == text.replace("ended with exit code", "failed with")


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("one\ntwo", "one\ntwo"),
        ("first\nsecond\nthird", "third"),
        ("first\nfour\nfive\n", "four\nfive\n"),
        ("a single line that is too long", "s too long"),
        ("first\na line that is too long\n", " too long\n"),
    ],
)
def test_quoted_output_begins_with_a_line(text: str, quoted: str) -> None:
    assert last_output(text, 10) == quoted
