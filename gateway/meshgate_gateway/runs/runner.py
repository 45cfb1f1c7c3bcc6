"""``python -m meshgate_gateway.runs.runner DIRECTORY DESCRIPTOR``: runs one submitted program to its end.

A process of its own for each run, under the supervisor, so that it outlives servers. It copies the synced version,
starts the program, keeps what that prints, holds its limits, starts it again if it may, and notes how it ended.
``DESCRIPTOR`` is at its end of file once the gateway has ended: the run then ends too.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from meshgate_gateway.runs.limits import (
    DEFAULT_DISK,
    DEFAULT_PROCESSES,
    Limits,
    adopt_orphans,
    descendants,
    disk_used,
    kill_descendants,
    limit_this_process,
    memory_of,
    nearly_full,
)
from meshgate_gateway.runs.records import PROGRAM_ENDED, SECRET, OutputWriter, RunDirectory, RunRecord, Submitted
from meshgate_processes.control_groups import memory_limit
from meshgate_processes.identity import exit_text
from meshgate_sync.errors import SyncError
from meshgate_sync.store.home import default_home
from meshgate_sync.store.store import Store

LOOK = 0.2  # seconds between two looks at memory and processes; a process may allocate a gigabyte in one
LOOK_AT_DISK = 2.0
SHARE = 20  # looking takes a twentieth of a processor at most, however many processes and files there are
CHUNK = 1 << 16
FIRST_DELAY = 1.0  # seconds until a restart; doubles with each further one
MAX_DELAY = 60.0
END_GRACE = 5.0  # seconds that the program has to end with its gateway
SESSIONS_GRACE = 20.0  # seconds for the end of the sessions that it held, before it is started again
OUTPUT_GRACE = 2.0  # seconds for output that is still in the pipe after the last process has ended


class Runner:
    def __init__(self, directory: RunDirectory, lifetime: int) -> None:
        self._directory, self._lifetime = directory, lifetime
        self._submitted: Submitted = directory.submitted()
        self._record = directory.record()
        self._output = OutputWriter(directory.output)
        self._wake, wake_writer = os.pipe()
        for end in (self._wake, wake_writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._gateway_ended = False
        self._deadline: float | None = None  # when the program is killed; it is then not started again
        self._grace: float | None = None  # the shortest that was requested
        self._excess = ""  # the limit that it has exceeded
        submission = self._submitted.submission
        self._limits = Limits(
            memory=submission.memory or memory_limit() // 2,  # the gateway needs the rest
            processes=submission.processes or DEFAULT_PROCESSES,
            disk=submission.disk or DEFAULT_DISK,
        )

    def run(self) -> None:
        adopt_orphans()
        restarts = self._submitted.submission.restarts
        try:
            self._copy_project()
            while True:
                code = self._run_program()
                if code == 0 or self._deadline is not None or self._record.restarts >= restarts:
                    break
                self._note(state="restarting", reason=_ending(code), exit_code=code)
                if not self._pause(min(FIRST_DELAY * 2**self._record.restarts, MAX_DELAY)):
                    break
                self._note(state="starting", restarts=self._record.restarts + 1)
        except (OSError, SyncError, subprocess.SubprocessError) as error:
            began = "it was ended because its runner failed" if self._record.started else "it could not be started"
            self._end("failed", f"{began}: {error}", None)
            return
        if self._excess:
            self._end("failed", self._excess, code)
        elif self._deadline is not None:
            killed = code == -signal.SIGKILL  # by this process, after the grace
            self._end("stopped", self._record.reason or ("was killed by SIGKILL" if killed else _ending(code)), code)
        else:
            self._end("failed" if code else "succeeded", _ending(code), code)

    def _copy_project(self) -> None:
        store = Store(default_home(), snapshots=False)
        try:
            store.copy_version(bytes.fromhex(self._submitted.submission.version), str(self._directory.project))
        finally:
            store.close()

    # --- one start of the program

    def _run_program(self) -> int:
        """The exit code, negative for a signal. Raises OSError if it cannot be started."""
        output, theirs = os.pipe()
        os.set_blocking(output, False)
        try:
            program = self._start(theirs)
        except OSError:
            os.close(output)
            raise
        finally:
            os.close(theirs)
        try:
            self._note(state="running", started=self._record.started or time.time(), pid=program.pid, reason="")
            code = self._attend(program, output)
        finally:  # also if the disk is full: no program goes on without its runner
            kill_descendants(program.pid)
        self._drain(output)
        return code

    def _start(self, output: int) -> subprocess.Popen[bytes]:
        submission, limits = self._submitted.submission, self._limits
        directory = self._directory.project / submission.directory
        environment = self._environment()
        program = submission.command[0]

        def prepare() -> None:
            limit_this_process(limits)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a gateway on a node of a Slurm job blocks SIGTERM

        try:
            return subprocess.Popen(
                submission.command,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509 - this process has one thread
            )
        except FileNotFoundError as error:
            missing = f"the directory {submission.directory}" if error.filename == str(directory) else program
            raise FileNotFoundError(
                f"{missing} was not found on the gateway's machine: neither in the synced project nor in PATH"
            ) from None

    def _environment(self) -> dict[str, str]:
        submission, project = self._submitted.submission, self._directory.project
        inherited = {name: value for name, value in os.environ.items() if name not in self._submitted.set_aside}
        environment = {**inherited, **submission.environment}
        paths = [os.path.normpath(project / path) for path in submission.paths]
        before = environment.get("PYTHONPATH", "").split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in [*paths, *before] if path))
        environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environment.get("PATH", os.defpath)])
        environment.setdefault("PYTHONUNBUFFERED", "1")  # what a program prints is kept as it prints it
        own = {"MESHGATE_RUN_PROJECT": str(project), SECRET: os.environ[SECRET]}
        return environment | self._submitted.variables | own

    def _attend(self, program: subprocess.Popen[bytes], output: int) -> int:
        """Keeps what the program prints, and ends it when it must end. Returns its exit code."""
        look = look_at_disk = time.monotonic()
        directory = self._directory.path
        reading = [self._wake, self._lifetime, output]
        while (code := self._reap(program)) is None:
            now = time.monotonic()
            if self._deadline is not None and now >= self._deadline:
                kill_descendants(program.pid)
            elif now >= look:
                used = time.process_time()  # on a busy machine looking takes longer, but must not be rarer
                self._look(program)
                look = now + max(LOOK, SHARE * (time.process_time() - used))
            if now >= look_at_disk or nearly_full(os.statvfs(directory)):
                used = time.process_time()
                self._look_at_disk(program)
                look_at_disk = now + max(LOOK_AT_DISK, SHARE * (time.process_time() - used))
            self._stop_if_asked(program)
            for ready in select.select(reading, [], [], LOOK)[0]:
                if ready == output and not self._read(output):
                    reading.remove(output)
                elif ready == self._lifetime:
                    reading.remove(self._lifetime)
                    self._gateway_ended = True
                elif ready == self._wake:
                    _empty(self._wake)
        return code

    def _reap(self, program: subprocess.Popen[bytes]) -> int | None:
        """Collects children that have ended, orphans of the program too. The exit code of the program, if it has."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if pid == program.pid:
                program.returncode = os.waitstatus_to_exitcode(status)
            if not pid:
                return program.returncode

    def _stop_if_asked(self, program: subprocess.Popen[bytes]) -> None:
        grace = self._directory.stop_grace()
        if self._gateway_ended:
            grace = END_GRACE if grace is None else min(grace, END_GRACE)
        if grace is None or (self._grace is not None and grace >= self._grace):
            return
        first, self._grace = self._deadline is None, grace  # a later request can only shorten the time to save
        self._deadline = min(self._deadline or math.inf, time.monotonic() + grace)
        if first:
            _signal_group(program.pid, signal.SIGTERM)
            self._note(state="stopping", reason="its gateway has ended" if self._gateway_ended else "")

    def _look(self, program: subprocess.Popen[bytes]) -> None:
        pids = descendants(os.getpid())
        exceeded = self._limits.exceeded(memory_of(pids, self._limits.memory), len(pids))
        if exceeded:
            self._end_for(exceeded, program)

    def _look_at_disk(self, program: subprocess.Popen[bytes]) -> None:
        used, files = disk_used(self._directory.path)
        exceeded = self._limits.disk_exceeded(used, files, os.statvfs(self._directory.path))
        if exceeded:
            self._end_for(exceeded, program)

    def _end_for(self, reason: str, program: subprocess.Popen[bytes]) -> None:
        """Kills the program at once: what it does harms others. It is not started again."""
        kill_descendants(program.pid)
        self._deadline = time.monotonic()
        self._excess = reason

    # --- output

    def _read(self, output: int) -> bool:
        """Whether there may be more."""
        try:
            data = os.read(output, CHUNK)
        except BlockingIOError:
            return True
        self._output.write(data)
        return bool(data)

    def _drain(self, output: int) -> None:
        """Reads what is left in the pipe, which nothing writes to any more, and closes it."""
        deadline = time.monotonic() + OUTPUT_GRACE
        while (left := deadline - time.monotonic()) > 0 and select.select([output], [], [], left)[0]:
            if not self._read(output):
                break
        os.close(output)

    def _say(self, text: str) -> None:
        """A line of the gateway's in the output of the run."""
        self._output.write(f"meshgate: {text}\n".encode())

    # --- between and after starts

    def _pause(self, seconds: float) -> bool:
        """Waits until the program may be started again: also for the server, which ends the sessions that it held, with
        their processes. Returns False if it is not, because the run must end."""
        restart = f"Restart {self._record.restarts + 1} of {self._submitted.submission.restarts}"
        self._say(f"{self._record.reason}. {restart} in {seconds:g} s")
        with contextlib.suppress(OSError):  # the supervisor has ended, and with it the gateway
            print(PROGRAM_ENDED, flush=True)  # noqa: T201 - to the server
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds or (
            passed < SESSIONS_GRACE and self._directory.sessions_ended() <= self._record.restarts
        ):
            left = seconds - passed
            ready = select.select([self._lifetime], [], [], min(left, LOOK) if left > 0 else LOOK)[0]
            if self._directory.stop_grace() is not None or self._lifetime in ready:
                self._deadline = time.monotonic()
                return False
        return True

    def _end(self, state: str, reason: str, code: int | None) -> None:
        if self._excess or code is None:
            self._say(reason)
        end = {"state": state, "reason": reason, "exit_code": code, "ended": time.time(), "pid": None}
        try:
            self._note(**end)
        except OSError:  # the program has filled the disk
            shutil.rmtree(self._directory.project, ignore_errors=True)
            self._note(**end)

    def _note(self, **changes: object) -> None:
        self._record = RunRecord.model_validate({**self._record.model_dump(), **changes})
        self._directory.write_record(self._record)


def _ending(code: int) -> str:
    if code == -signal.SIGABRT:
        return (
            "was ended by SIGABRT. If its last line is 'FATAL: exception not rethrown', that was while the interpreter "
            "shut down, after the program's end: before Python 3.14, end one that uses Monarch itself with os._exit()"
        )
    text = exit_text(code, exited="exited with code")
    memory = ", which is how the kernel ends a process if the machine or job is out of memory"
    return text + memory if code == -signal.SIGKILL else text


def _signal_group(group: int, signum: signal.Signals) -> None:
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return


def _empty(pipe: int) -> None:
    try:
        os.read(pipe, 4096)
    except BlockingIOError:
        return


def main() -> None:
    Runner(RunDirectory(Path(sys.argv[1])), int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
