from __future__ import annotations

import logging
import os
import subprocess

import pytest

from meshgate.jobs.this_machine import shared_machine


@pytest.fixture
def stranger() -> int:
    """The ID of a user without an account."""
    return 4_000_123


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")
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


def test_own_processes_and_those_of_the_system_are_not_other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_machine, "FIRST_USER", 2**32)
    assert shared_machine.other_users() == []


def test_a_machine_without_proc_has_no_abstract_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("pathlib.Path.iterdir", fail)
    assert shared_machine.other_users() == []
