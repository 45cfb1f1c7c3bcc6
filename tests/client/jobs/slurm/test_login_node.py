"""Commands on the login node, and the connection to it that programs share."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from meshgate.errors import ConnectionFailedError, JobError
from meshgate.jobs.slurm import login_node
from meshgate.jobs.slurm.login_node import CommandOutput, SshLogin, ThisMachine, private_directory, python_command
from tests.waiting import wait_for

# Its connection is open while the file "open" is there. The log has a word for each time that it ran.
SSH = """#!/bin/sh
directory=$(dirname "$0")
case "$*" in
*" ControlMaster=auto "*) word=connect; touch "$directory/open" ;;
*" -O check "*) word=check ;;
*" -O forward "*) word=forward ;;
*" -O cancel "*) word=cancel ;;
*) word=other ;;
esac
test -e "$directory/open"
code=$?
echo $word >> "$directory/log"
exit $code
"""


def test_a_command_runs_with_its_input() -> None:
    output = ThisMachine().run("cat; echo problem >&2; exit 3", "hello")
    assert (output.code, output.stdout, output.stderr) == (3, "hello", "problem\n")


def test_the_shell_expands_the_home_of_a_python_and_nothing_else() -> None:
    command = f"printf '%s\\n' {python_command('~/my env/bin/$(x)', '-m', 'a b')}"
    shown = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == [os.path.expanduser("~/my env/bin/$(x)"), "-m", "a b"]


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What ssh has done since the last call."""
    program, log = tmp_path / "ssh", tmp_path / "log"
    program.write_text(SSH)
    program.chmod(0o755)
    log.touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(login_node, "TEMPORARY", str(tmp_path))

    seen = 0

    def read() -> list[str]:
        nonlocal seen
        words = log.read_text().splitlines(keepends=True)[seen:]
        new = [word.strip() for word in words if word.endswith("\n")]
        seen += len(new)
        return new

    return read


def test_a_program_uses_the_connection_of_another_and_leaves_it_open(ran: Callable[[], list[str]]) -> None:
    for opened in (["check", "check", "connect"], ["check"]):
        login = SshLogin("me@login")
        login.open()
        login.close()
        assert ran() == opened


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("Permission denied (publickey)", True),
        ("sign_and_send_pubkey: signing failed for RSA key: agent refused operation", True),
        ("Idle sessions are timed out. No route to host n1 until Monday", True),
        ("ssh: connect to host login port 22: No route to host", False),
        ("ssh: connect to host login port 22: Connection refused", False),
        ("ssh: connect to host login port 22: Operation timed out", False),
        ("ssh: Could not resolve hostname login: Name or service not known", False),
    ],
)
@pytest.mark.usefixtures("ran")
def test_a_key_is_advised_only_if_the_login_node_can_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, advice: bool
) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 255\n")
    monkeypatch.setattr(login_node, "_can_prompt", lambda: False)
    with pytest.raises(ConnectionFailedError) as failed:
        SshLogin("me@login").open()
    assert f"ssh cannot connect to me@login: {words}" in str(failed.value)
    assert ("load a key into ssh-agent" in str(failed.value)) is advice


def test_a_connection_that_another_program_opens_is_waited_for(ran: Callable[[], list[str]], tmp_path: Path) -> None:
    login = SshLogin("me@login")
    seen: list[str] = []
    with open(f"{login._key}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        opening = threading.Thread(target=login.open)
        opening.start()
        wait_for(lambda: seen.extend(ran()) or seen, "the first question")  # type: ignore[func-returns-value]
        (tmp_path / "open").touch()
    opening.join()
    assert [*seen, *ran()] == ["check", "check"]


def test_a_program_that_is_stopped_as_it_connects_does_not_block_others_for_ever(
    ran: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    login = SshLogin("me@login")
    with monkeypatch.context() as changed, open(f"{login._key}.lock", "wb") as lock:
        changed.setattr(login_node, "OPEN_TIMEOUT", 0.0)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConnectionFailedError, match="another meshgate program has been connecting to me@login for"):
            login.open()
    assert ran() == ["check"]
    login.open()
    assert ran() == ["check", "check", "connect"]


def test_commands_take_turns_within_the_sessions_that_sshd_allows(
    ran: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    login = SshLogin("me@login")
    commands: list[Callable[[], CommandOutput]] = [
        lambda: login.run("true", ""),
        lambda: login.submit("true", "", lambda _: True),
    ]
    login.open()
    with monkeypatch.context() as changed, ExitStack() as others:
        changed.setattr(login_node, "COMMAND_TIMEOUT", 0.0)
        for n in range(login_node.MOST_COMMANDS):
            fcntl.flock(others.enter_context(open(f"{login._key}.turn{n}", "wb")), fcntl.LOCK_EX)
        for command in commands:
            with pytest.raises(ConnectionFailedError, match="8 other commands of your meshgate programs have been"):
                command()
    assert ran() == ["check", "check", "connect", "check", "check"]
    login.run("true", "")
    assert ran() == ["check", "other"]


def test_a_forwarding_is_made_again_in_a_connection_that_another_program_opened(ran: Callable[[], list[str]]) -> None:
    login = SshLogin("me@login")
    local = login.forward("/there")
    assert ran() == ["check", "check", "connect", "forward"]
    assert login.forward("/there") == local
    assert ran() == ["forward"]
    login.close()


def test_a_forwarding_of_a_connection_that_broke_is_made_again(ran: Callable[[], list[str]], tmp_path: Path) -> None:
    login = SshLogin("me@login")
    local = login.forward("/there")
    (tmp_path / "open").unlink()
    ran()
    assert login.forward("/there") == local
    assert ran() == ["forward", "check", "check", "connect", "forward"]
    login.close()


def test_the_forwardings_of_a_program_end_with_it(ran: Callable[[], list[str]]) -> None:
    login = SshLogin("me@login")
    socket = Path(login.forward("/there"))
    socket.touch()
    ran()
    login.close()
    assert ran() == ["cancel"]
    assert not socket.exists()
    with pytest.raises(JobError, match="has been closed"):
        login.forward("/there")


def test_a_forwarding_that_is_made_while_its_program_closes_ends_too(
    ran: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    login = SshLogin("me@login")
    login.open()
    ran()
    control = login._control_ssh

    def closed_after_forward(command: str, *options: str) -> CommandOutput:
        output = control(command, *options)
        if command == "forward":
            login.close()
        return output

    monkeypatch.setattr(login, "_control_ssh", closed_after_forward)
    with pytest.raises(JobError, match="has been closed"):
        login.forward("/there")
    assert ran() == ["check", "forward", "cancel"]


def test_sockets_of_an_earlier_connection_are_removed(ran: Callable[[], list[str]]) -> None:
    login = SshLogin("me@login")
    leftover, other = Path(f"{login._key}-of-a-killed-driver"), Path(f"{SshLogin('me@other')._key}-gateway")
    leftover.touch()
    other.touch()
    login.open()
    assert other.exists()
    assert not leftover.exists()


@pytest.mark.usefixtures("ran")
def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    directory = Path(private_directory())
    assert private_directory() == str(directory)
    directory.chmod(0o750)
    with pytest.raises(JobError, match=rf"connections .* need {directory} .* is drwxr-x--- .* set TMPDIR to"):
        SshLogin("me@login")
    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(JobError, match="is lrwxrwxrwx"):
        SshLogin("me@login")


def test_the_directory_is_examined_before_each_use_of_the_connection(ran: Callable[[], list[str]]) -> None:
    login = SshLogin("me@login")
    local = login.forward("/there")
    directory = Path(login._directory)
    shutil.rmtree(directory)
    assert login.forward("/there") == local  # a cleaner of temporary files removed it
    ran()
    directory.chmod(0o755)  # as would be one that another user made
    for use in (login.open, lambda: login.run("true", ""), lambda: login.forward("/there")):
        with pytest.raises(JobError, match="is drwxr-xr-x"):
            use()
    login.close()
    assert ran() == []


def test_the_path_of_a_socket_is_short_enough() -> None:
    longest = f"{'t' * login_node._LONGEST}/meshgate-ssh-{2**32 - 2}/{'0' * 40}.{'x' * 16}"
    assert len(longest) <= 103
