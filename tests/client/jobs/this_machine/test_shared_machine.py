from __future__ import annotations

import logging
import os
import subprocess

import pytest

from meshgate.jobs.this_machine import shared_machine


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> int:
    """The ID of a user without an account, who is one of the system's own to the jobs that other tests start."""
    user = 977
    monkeypatch.setattr(shared_machine, "FIRST_USER", user)
    return user


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")


@only_root
def test_another_users_process_is_named_once_at_the_start(caplog: pytest.LogCaptureFixture, stranger: int) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=stranger, cwd="/") as process:
        assert f"user {stranger}" in shared_machine.other_users()
        with caplog.at_level(logging.WARNING, "meshgate.jobs"):
            shared_machine.warn_of_other_users()
            shared_machine.warn_of_other_users()
        assert process.stdin is not None
        process.stdin.close()
    (message,) = [record.getMessage() for record in caplog.records if f"user {stranger}" in record.getMessage()]
    assert "can run code as you while a local job runs" in message


@only_root
def test_a_process_that_has_ended_is_not_another_users(stranger: int) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=stranger, cwd="/") as process:
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays in /proc until its parent waits for it
        assert f"user {stranger}" not in shared_machine.other_users()


def test_own_processes_and_those_of_the_system_are_not_other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_machine, "FIRST_USER", 2**32)
    assert shared_machine.other_users() == []


def test_a_machine_without_proc_has_no_abstract_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("pathlib.Path.iterdir", fail)
    assert shared_machine.other_users() == []
