"""Programs with a runner of their own: their surroundings, their end, their limits."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.runs.run_process import RunProcess
from tests.gateway.server_process import wait_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limits of a run need /proc")

SURROUNDINGS = """
import json, os, sys, helper
seen = {name: os.environ.get(name) for name in ("MESHGATE_RUN", "MESHGATE_PORT", "MESHGATE_RUN_PROJECT", "LR")}
print(json.dumps({"cwd": os.getcwd(), "argv": sys.argv[1:], "helper": helper.__file__, **seen}))
open("written", "w").write("here")
"""


def run(place: Path, program: str, *arguments: str, **options: object) -> RunProcess:
    return RunProcess(place, ["python", "main.py", *arguments], {"main.py": program}, **options)


def test_a_program_runs_in_its_copy_of_the_project(tmp_path: Path) -> None:
    project = {"src/train/main.py": SURROUNDINGS, "lib/helper.py": "", "empty": ""}
    options = {"directory": "src/train", "paths": ("lib", "src"), "environment": {"LR": "1e-3"}}
    with RunProcess(tmp_path, ["python", "main.py", "--lr"], project, **options) as night:
        record = night.wait()
    assert (record.state, record.exit_code) == ("succeeded", 0)
    copy = night.directory.project
    assert json.loads(night.output) == {
        "cwd": str(copy / "src/train"),
        "argv": ["--lr"],
        "helper": str(copy / "lib/helper.py"),
        "MESHGATE_RUN": "night",
        "MESHGATE_PORT": None,
        "MESHGATE_RUN_PROJECT": str(copy),
        "LR": "1e-3",
    }
    assert (copy / "src/train/written").read_text() == "here"
    assert (copy / "empty").read_bytes() == b""


def test_output_and_exit_code_are_the_programs(tmp_path: Path) -> None:
    program = "import sys\nprint('out\\rprogress', end='')\nprint('err', file=sys.stderr)\n1 / 0\n"
    with run(tmp_path, program) as night:
        record = night.wait()
    assert (record.state, record.exit_code, record.reason) == ("failed", 1, "exited with code 1")
    assert night.output.startswith("out\rprogresserr\nTraceback (most recent call last):\n")
    assert night.output.endswith("ZeroDivisionError: division by zero\n")


def test_what_the_program_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "code = 'import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(1000)'\n"
        "left = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)\n"
        "print(left.stdout.readline().decode(), end='')\n"
    )
    with run(tmp_path, program) as night:
        assert night.wait().state == "succeeded"
        wait_gone(int(night.output))


@pytest.fixture(params=[(), (signal.SIGTERM,)], ids=["none", "SIGTERM"])
def _blocked(request: pytest.FixtureRequest) -> Iterator[None]:
    """The signals that the gateway blocks: on a node of a Slurm job SIGTERM."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, request.param)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.usefixtures("_blocked")
def test_a_program_has_time_to_save_when_it_is_stopped(tmp_path: Path) -> None:
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(7)))\n"
        "print('ready')\nwhile True: signal.pause()\n"
    )
    with run(tmp_path, program, restarts=3) as night:
        night.wait_printed("ready")
        night.stop(grace=600)
        record = night.wait()
    assert night.output == "ready\nsaved\n"
    assert (record.state, record.exit_code, record.restarts) == ("stopped", 7, 0)


def test_a_program_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    program = (
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\nwhile True: signal.pause()\n"
    )
    with run(tmp_path, program) as night:
        night.wait_printed("ready")
        night.stop(grace=0.1)
        record = night.wait()
    assert (record.state, record.exit_code, record.reason) == ("stopped", -signal.SIGKILL, "was killed by SIGKILL")


def test_an_abort_while_the_interpreter_shuts_down_is_explained(tmp_path: Path) -> None:
    with run(tmp_path, "import os\nos.abort()\n") as night:
        record = night.wait()
    assert (record.state, record.exit_code) == ("failed", -signal.SIGABRT)
    assert "FATAL: exception not rethrown" in record.reason


def test_a_run_ends_with_its_gateway(tmp_path: Path) -> None:
    with run(tmp_path, "import os, signal\nprint(os.getpid())\nwhile True: signal.pause()\n") as night:
        night.wait_printed("\n")
        night.close_lifetime()
        record = night.wait()
        wait_gone(int(night.output))
    assert (record.state, record.reason) == ("stopped", "its gateway has ended")


def test_a_failed_program_is_started_again_as_often_as_requested(tmp_path: Path) -> None:
    program = "print('start')\nraise SystemExit(3)\n"
    with run(tmp_path, program, restarts=1) as night:
        record = night.wait()
    assert (record.state, record.exit_code, record.restarts) == ("failed", 3, 1)
    assert night.output == "start\nmeshgate: exited with code 3. Restart 1 of 1 in 1 s\nstart\n"


def test_a_program_that_then_succeeds_is_not_started_again(tmp_path: Path) -> None:
    program = "import os\nif not os.path.exists('again'): open('again', 'w'); raise SystemExit(3)\nprint('done')\n"
    with run(tmp_path, program, restarts=5) as night:
        record = night.wait()
    assert (record.state, record.exit_code, record.restarts) == ("succeeded", 0, 1)


def test_a_program_is_started_again_once_the_sessions_that_it_held_are_over(tmp_path: Path) -> None:
    with run(tmp_path, "print('start')\nraise SystemExit(3)\n", restarts=1, sessions_end=False) as night:
        night.wait_printed("Restart 1 of 1 in 1 s")
        with pytest.raises(subprocess.TimeoutExpired):
            night.process.wait(2.0)
        assert night.directory.record().state == "restarting"
        night.directory.note_sessions_ended(1)
        assert night.wait().restarts == 1
    assert night.output.endswith("start\n")


def test_a_run_can_be_stopped_between_two_starts(tmp_path: Path) -> None:
    with run(tmp_path, "raise SystemExit(3)\n", restarts=1000) as night:
        night.wait_printed("Restart 3 of 1000 in 4 s")
        night.stop(grace=600)
        record = night.wait()
    assert record.state == "stopped"
    assert record.exit_code in (3, -signal.SIGTERM)  # it may just have been started once more


def test_a_program_that_does_not_exist_fails_its_run(tmp_path: Path) -> None:
    with RunProcess(tmp_path, ["no-such-program"], {"a": "b"}) as night:
        record = night.wait()
    assert (record.state, record.exit_code) == ("failed", None)
    assert "no-such-program was not found" in record.reason
    assert "no-such-program was not found" in night.output


def test_a_version_that_is_not_there_fails_its_run(tmp_path: Path) -> None:
    with RunProcess(tmp_path, ["python"], {}, version="ab" * 32) as night:
        record = night.wait()
    assert (record.state, record.exit_code) == ("failed", None)
    assert "abababababab" in record.reason


def test_a_process_that_needs_too_much_memory_gets_a_memory_error(tmp_path: Path) -> None:
    with run(tmp_path, "data = bytearray(300_000_000)\n", memory=200_000_000) as night:
        record = night.wait()
    assert (record.state, record.exit_code) == ("failed", 1)
    assert night.output.endswith("MemoryError\n")


def test_processes_that_need_too_much_memory_together_end_their_run(tmp_path: Path) -> None:
    program = (
        "import os, signal\n"
        "for _ in range(4):\n"
        "    if not os.fork(): data = bytearray(os.urandom(1)) * 60_000_000; signal.pause()\n"
        "while True: signal.pause()\n"
    )
    with run(tmp_path, program, memory=150_000_000, restarts=5) as night:
        record = night.wait()
    assert (record.state, record.exit_code, record.restarts) == ("failed", -signal.SIGKILL, 0)
    assert record.reason.startswith("it used ")
    assert record.reason.endswith("of memory, and its limit is 150.0 MB")
    assert record.reason in night.output


def test_too_many_processes_end_their_run(tmp_path: Path) -> None:
    program = (
        "import os, signal\nfor _ in range(15):\n    if not os.fork(): signal.pause()\nwhile True: signal.pause()\n"
    )
    with run(tmp_path, program, processes=10) as night:
        record = night.wait()
    assert (record.state, record.exit_code) == ("failed", -signal.SIGKILL)
    assert re.fullmatch(r"it had 1\d processes, and its limit is 10", record.reason)


def test_the_kernel_limits_processes_files_and_data_of_a_program(tmp_path: Path) -> None:
    program = (
        "import json, resource as r\n"
        "print(json.dumps([r.getrlimit(k)[0] for k in (r.RLIMIT_DATA, r.RLIMIT_FSIZE, r.RLIMIT_CORE)]))\n"
        "print(r.getrlimit(r.RLIMIT_NPROC)[0])\n"
    )
    with run(tmp_path, program, memory=500_000_000, disk=7_000_000, processes=100) as night:
        night.wait()
    limits, processes = night.output.splitlines()
    assert json.loads(limits) == [500_000_000, 7_000_000, 0]
    assert 400 < int(processes) < 100_000


def test_a_program_that_fills_the_disk_ends_its_run(tmp_path: Path) -> None:
    program = (
        "import itertools, time\n"
        "for number in itertools.count(): open(f'file-{number}', 'wb').write(b'x' * 500_000); time.sleep(0.01)\n"
    )
    with run(tmp_path, program, disk=20_000_000) as night:
        record = night.wait()
    assert record.state == "failed"
    assert record.reason.endswith("and its limit is 20.0 MB")


def test_the_kernel_ends_the_processes_of_runs_first(tmp_path: Path) -> None:
    with run(tmp_path, "print(open('/proc/self/oom_score_adj').read(), end='')\n") as night:
        night.wait()
    assert night.output == "1000\n"


def test_the_end_of_the_runner_is_not_held_up_by_a_process_that_ignores_signals(tmp_path: Path) -> None:
    program = (
        "import os, signal, time\n"
        "if not os.fork():\n"
        "    os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    while True: signal.pause()\n"
        "print('ready')\n"
        "while True: signal.pause()\n"
    )
    with run(tmp_path, program) as night:
        night.wait_printed("ready")
        night.stop(grace=600)
        record = night.wait()
    assert (record.state, record.exit_code) == ("stopped", -signal.SIGTERM)
    assert os.path.isdir(night.directory.project)


WAITS = (
    "import os, signal\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print(os.getpid())\n"
    "print('ready')\n"
    "while True: signal.pause()\n"
)


@pytest.mark.parametrize("how", ["stop", "end of the gateway"])
def test_the_time_to_save_can_be_shortened(tmp_path: Path, how: str) -> None:
    with run(tmp_path, WAITS) as night:
        night.wait_printed("ready")
        night.stop(grace=3600)
        night.wait_recorded("stopping")
        if how == "stop":
            night.stop(grace=0)
        else:
            night.close_lifetime()
        record = night.wait()
    assert (record.state, record.exit_code) == ("stopped", -signal.SIGKILL)


def test_a_program_ends_with_a_runner_that_fails(tmp_path: Path) -> None:
    with run(tmp_path, WAITS) as night:
        night.wait_printed("ready")
        program = int(night.output.splitlines()[0])
        night.directory.path.rename(tmp_path / "elsewhere")
        night.process.wait(60)
        wait_gone(program)
