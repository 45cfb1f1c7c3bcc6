"""What the program on the login node says about a job's gateway."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from meshgate_processes.identity import identify_process
from meshgate_slurm import login
from meshgate_slurm.gateway_process import LOG_FILE
from meshgate_slurm.login import _state
from meshgate_slurm.messages import GatewayState, RunningSlurmJob


@pytest.mark.parametrize(
    ("started", "alive"),
    [(None, True), ("1", False), ("login2:0/another boot/1/5", True)],  # of this process, a reused pid, and elsewhere
)
def test_only_the_machine_of_a_gateway_says_that_it_has_ended(tmp_path: Path, started: str | None, alive: bool) -> None:
    (tmp_path / LOG_FILE).write_text("last words")
    own = identify_process(os.getpid())
    assert own is not None
    job = RunningSlurmJob(
        apply_id="12345678", job_id=7, host="login", directory=str(tmp_path), socket="/s", pid=own.pid,
        started=started or own.started, token="", meshes={"a": 1}, log_dir="",
    )  # fmt: skip
    state = _state(json.dumps(job.model_dump()))
    assert isinstance(state, GatewayState)
    assert (state.alive, state.output) == (alive, "" if alive else "last words")


def test_a_job_whose_submitter_is_gone_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    job = RunningSlurmJob(
        apply_id="12345678", job_id=7, host="login", directory="/d", socket="/s", pid=1,
        started="", token="", meshes={"a": 1}, log_dir="",
    )  # fmt: skip
    ended: list[str] = []
    monkeypatch.setattr(login, "_start", lambda request: job)
    monkeypatch.setattr(login, "_end", ended.append)
    monkeypatch.setattr(sys, "argv", ["login", "start"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("{}"))
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as reply:
        monkeypatch.setattr(sys, "stdout", reply)
        with pytest.raises(SystemExit):
            login.main()
    assert ended == [job.model_dump_json()]
