"""Where Slurm's commands are: this machine, or a login node that ``ssh`` reaches."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import glob
import hashlib
import os
import re
import secrets
import shlex
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from meshgate.errors import ConnectionFailedError, JobError
from meshgate.proxies.client import close_all_clients
from meshgate_slurm.messages import run_submission

COMMAND_TIMEOUT = 180.0
CONNECT_TIMEOUT = 20
OPEN_TIMEOUT = 300.0  # includes the time to type a password and to confirm on a telephone
CONTROL_TIMEOUT = 20.0
MOST_COMMANDS = 8  # at once in a connection: sshd refuses more than its MaxSessions, which is 10 by default
IDLE_LIMIT = 300  # seconds that a connection stays open which nothing uses
_LONGEST = 20  # bytes of the directory below: the path of a unix socket has at most 103, of which ssh adds 57
TEMPORARY = tempfile.gettempdir() if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST else "/tmp"
SSH_FAILED = 255  # ssh's own exit code for a connection that failed


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """What a command on the login node returned."""

    code: int
    stdout: str
    stderr: str


class LoginNode(Protocol):
    """A machine with Slurm's commands. All methods may block and raise JobError or OSError."""

    def open(self) -> None:
        """Connects. May ask the user for a password on the terminal. Called again to connect again."""

    def run(self, command: str, stdin: str) -> CommandOutput:
        """Runs a shell command there."""

    def submit(self, command: str, request: str, confirm: Callable[[str], bool]) -> CommandOutput:
        """Runs a shell command that submits a job; see ``run_submission``."""

    def forward(self, remote: str) -> str:
        """What on this machine leads to ``remote``, as seen from there. Both are the path of a unix socket or
        ``host:port``."""

    def close(self) -> None: ...

    def __str__(self) -> str:
        """The machine in error messages."""


class ThisMachine:
    """This machine is a login node itself."""

    def open(self) -> None:
        return None

    def run(self, command: str, stdin: str) -> CommandOutput:
        shell, pipe = ["/bin/sh", "-c", command], subprocess.PIPE
        process = subprocess.Popen(shell, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        try:
            stdout, stderr = process.communicate(stdin, COMMAND_TIMEOUT)
        except BaseException:  # as over ssh, what the command has begun continues, such as the end of a job
            for each in filter(None, (process.stdin, process.stdout, process.stderr)):
                each.close()
            raise
        return CommandOutput(process.returncode, stdout, stderr)

    def submit(self, command: str, request: str, confirm: Callable[[str], bool]) -> CommandOutput:
        # In a session of its own: as over ssh, Ctrl-C does not reach it.
        shell = ["/bin/sh", "-c", command]
        result = run_submission(shell, request, confirm, COMMAND_TIMEOUT, start_new_session=True)
        return CommandOutput(result.returncode, result.stdout, result.stderr)

    def forward(self, remote: str) -> str:
        return remote

    def close(self) -> None:
        return None

    def __str__(self) -> str:
        return f"this machine ({os.uname().nodename})"


def python_command(python: str, *arguments: str) -> str:
    """A shell command that runs ``python``, whose leading ``~/`` the shell expands."""
    quoted = f"~/{shlex.quote(python[2:])}" if python.startswith("~/") else shlex.quote(python)
    return " ".join([quoted, *map(shlex.quote, arguments)])


# The user's ssh configuration applies: keys, agents, jump hosts, Kerberos. On a terminal, ssh itself asks for
# passwords, codes and unknown host keys; without one it fails instead of waiting for an answer that cannot come.


def check_login(login: str) -> str:
    """``login`` if it can be the destination of ssh. Raises ValueError."""
    if not login or login.startswith("-") or any(character.isspace() for character in login):
        raise ValueError(f"SlurmJob(login={login!r}): expected a destination of ssh, such as 'user@login.example.org'")
    return login


def private_directory() -> str:
    """The directory of the sockets of this user's connections. Raises JobError if another user could enter it."""
    path = f"{TEMPORARY}/meshgate-ssh-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise JobError(
            f"connections to login nodes need {path} to be your directory, which no other user can enter "
            f"(mode 700), but it is {stat.filemode(found.st_mode)} of user {found.st_uid}: remove it, or set TMPDIR to "
            f"a private directory whose path has at most {_LONGEST} bytes"
        )
    return path


class SshLogin:
    """The connection of this user to a login node, which programs and commands on this machine share. ssh opens it on
    first use and again after it broke, and closes it once nothing has used it for ``IDLE_LIMIT`` seconds. Thread-safe.
    """

    def __init__(self, login: str) -> None:
        self._login = check_login(login)
        self._lock = threading.Lock()
        self._directory = private_directory()
        self._key = f"{self._directory}/{hashlib.sha256(login.encode()).hexdigest()[:12]}"
        self._control = f"{self._directory}/%C"  # ssh's hash of the machine, the user and the way there
        self._forwards: dict[str, str] = {}  # sockets here, by what they lead to there
        self._opened_before = self._closed = False
        _open.add(self)

    def open(self) -> None:
        with self._lock:
            self._ensure()

    def run(self, command: str, stdin: str) -> CommandOutput:
        with self._lock:
            self._ensure()
        with self._turn():
            return self._ssh(self._login_shell(command), stdin, COMMAND_TIMEOUT)

    def submit(self, command: str, request: str, confirm: Callable[[str], bool]) -> CommandOutput:
        with self._lock:
            self._ensure()
        ssh = [*self._base(), *self._login_shell(command)]
        with self._turn():
            result = run_submission(ssh, request, confirm, COMMAND_TIMEOUT)
        return CommandOutput(result.returncode, result.stdout, result.stderr)

    def forward(self, remote: str) -> str:
        with self._lock:
            local = self._forwards.get(remote) or f"{self._key}-{secrets.token_hex(6)}"
            pair = f"{local}:{remote}"
            # Each time: another process may have opened a new connection. Otherwise, ssh changes nothing.
            if remote not in self._forwards or (result := self._control_ssh("forward", "-L", pair)).code != 0:
                self._ensure()
                result = self._control_ssh("forward", "-L", pair)
            if result.code != 0:
                raise ConnectionFailedError(
                    f"ssh cannot forward to the gateway on {self}: {result.stderr.strip().rstrip('.')}. Is forwarding "
                    "disabled there (AllowTcpForwarding, AllowStreamLocalForwarding)?"
                )
            self._forwards[remote] = local
            if self._closed:  # close() takes no lock, and may have ended the others before this one was there
                self._cancel(remote)
                raise self._was_closed()
            return local

    def close(self) -> None:
        """Ends the forwardings, and leaves the connection to others. May be called again."""
        self._closed = True
        _open.discard(self)
        for remote in list(self._forwards):
            self._cancel(remote)

    def _cancel(self, remote: str) -> None:
        if local := self._forwards.pop(remote, None):
            # A connection that is stuck ends it with itself, and another user may have taken the directory.
            with contextlib.suppress(OSError, JobError):
                self._control_ssh("cancel", "-L", f"{local}:{remote}")
            with contextlib.suppress(OSError):
                Path(local).unlink()

    def __str__(self) -> str:
        return self._login

    def _ensure(self) -> None:
        """Opens the connection unless it is open. Raises ConnectionFailedError with ssh's words."""
        if self._closed:
            raise self._was_closed()
        if not self._is_open():
            busy = (
                f"another meshgate program has been connecting to {self._login} for {OPEN_TIMEOUT:g} s: answer what it "
                "asks in its terminal (`fg` there if it is stopped), or end it, and try again"
            )
            with _hold_one([f"{self._key}.lock"], OPEN_TIMEOUT, busy):
                if not self._is_open():
                    self._connect()
        self._opened_before = True

    def _was_closed(self) -> JobError:
        return JobError(f"the connection to {self._login} has been closed")

    def _turn(self) -> contextlib.AbstractContextManager[None]:
        """One of the ``MOST_COMMANDS`` turns. For a session that sshd refuses, ssh would open a connection of its own,
        which fails where a password is needed."""
        busy = (
            f"{MOST_COMMANDS} other commands of your meshgate programs have been running on {self._login} for "
            f"{COMMAND_TIMEOUT:g} s: wait for them, continue those that are stopped (`fg`) or end them, and try again"
        )
        return _hold_one([f"{self._key}.turn{n}" for n in range(MOST_COMMANDS)], COMMAND_TIMEOUT, busy)

    def _is_open(self) -> bool:
        return self._control_ssh("check").code == 0

    def _control_ssh(self, command: str, *options: str) -> CommandOutput:
        """Has the process of the open connection do something."""
        private_directory()  # a cleaner of temporary files may have removed it, and another user may have made one
        return self._ssh(["-O", command, *options, "--", self._login], "", CONTROL_TIMEOUT)

    def _connect(self) -> None:
        for leftover in glob.glob(f"{self._key}-*"):  # of the connection before
            Path(leftover).unlink(missing_ok=True)
        # In the background of a running program, a prompt would come as a surprise.
        batch = [] if not self._opened_before and _can_prompt() else ["-o", "BatchMode=yes"]
        master = ["-o", "ControlMaster=auto", "-o", f"ControlPersist={IDLE_LIMIT}"]  # removes the socket of a dead one
        alive = ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
        timeout = ["-o", f"ConnectTimeout={CONNECT_TIMEOUT}"]
        options = [*batch, *master, *alive, *timeout, "-o", "StreamLocalBindUnlink=yes"]
        result = self._ssh(["-N", "-f", *options, "--", self._login], "", OPEN_TIMEOUT)
        if result.code != 0:
            hint = "" if batch == [] or _NO_NETWORK.search(result.stderr) else _BATCH_HINT.format(login=self._login)
            raise ConnectionFailedError(f"ssh cannot connect to {self._login}: {_last_lines(result.stderr)}{hint}")

    def _login_shell(self, command: str) -> list[str]:
        shell = f"exec /bin/sh -lc {shlex.quote(command)}"  # its PATH is the one that has Slurm's commands
        return ["-o", "BatchMode=yes", "--", self._login, shell]

    def _base(self) -> list[str]:
        return ["ssh", "-o", f"ControlPath={self._control}", "-o", "ForwardX11=no", "-o", "ForwardAgent=no"]

    def _ssh(self, arguments: Sequence[str], stdin: str, timeout: float) -> CommandOutput:
        """Runs ssh. Its output goes to files: the background process of ``-f`` would keep a pipe open."""
        with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            try:
                code = subprocess.run(
                    [*self._base(), *arguments], stdin=given, stdout=out, stderr=err, timeout=timeout, check=False
                ).returncode
            except FileNotFoundError:
                raise JobError("SlurmJob(login=…) needs the ssh command, which this machine does not have") from None
            except subprocess.TimeoutExpired:
                raise ConnectionFailedError(f"ssh {self._login} did not finish within {timeout:g} s") from None
            out.seek(0)
            err.seek(0)
            return CommandOutput(code, out.read().decode(errors="replace"), err.read().decode(errors="replace"))


_open: set[SshLogin] = set()


@atexit.register
def close_at_exit() -> None:
    """Ends the sessions, then the connections that they need."""
    if _open:
        close_all_clients()
    for login in list(_open):
        login.close()


@contextlib.contextmanager
def _hold_one(files: Sequence[str], timeout: float, busy: str) -> Iterator[None]:
    """Holds the lock of one of these files, for which programs compete. Raises ConnectionFailedError(busy)."""
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as opened:
        locks = [opened.enter_context(open(file, "wb")) for file in files]
        while not any(map(_try_to_lock, locks)):
            if time.monotonic() >= deadline:  # a program that Ctrl-Z has stopped keeps its lock
                raise ConnectionFailedError(busy)
            time.sleep(0.1)
        yield


def _try_to_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_NO_NETWORK = re.compile(  # in ssh's own words; a banner or an agent may say "timed out" and "refused" as well
    r"^ssh: .*(Connection refused|(Connection|Operation) timed out|No route to host|Could not resolve|unreachable)",
    re.MULTILINE,
)
_BATCH_HINT = (
    ". It could not ask for a password, since this program has no terminal: load a key into ssh-agent, or run "
    "`ssh {login}` once to see what it asks"
)


def _can_prompt() -> bool:
    """Whether ssh can ask the user: on a terminal, or by the program of ``SSH_ASKPASS``."""
    if os.environ.get("SSH_ASKPASS"):
        return True
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
        return True
    return False


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[-3:]) or "it gave no reason"
