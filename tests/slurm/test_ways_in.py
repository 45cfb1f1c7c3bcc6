"""What a job offers besides its actors: commands, terminals, ports, stacks, files, image steps and live code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshgate import Image
from tests.slurm.actors import Trainer
from tests.slurm.cluster import small_job
from tests.waiting import wait_for
from tests.ways_in import (
    check_admin,
    check_commands,
    check_mounts,
    check_ports_and_stacks,
    check_telemetry,
    check_terminal,
)


def test_the_way_into_two_nodes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "greeting.py").write_text("TEXT = 'first'\n")
    image = (
        Image().set_env_vars({"FLAVOUR": "mint"}).run_bash('echo "$FLAVOUR" > /tmp/$SLURM_JOB_ID.$MESHGATE_HOST_NAME')
    )
    options: dict[str, Any] = {"sync_dirs": [str(project)], "watch": True, "image": image, "mem": "2500M"}
    with small_job({"workers": 2}, name, tmp_path, **options) as job:
        hosts = job.state().workers
        steps = job.exec(
            ["sh", "-c", "cat /tmp/$SLURM_JOB_ID.$MESHGATE_HOST_NAME; rm /tmp/$SLURM_JOB_ID.$MESHGATE_HOST_NAME"],
            capture_output=True,
        )
        assert [each.stdout for each in steps] == ["mint\n"] * 2
        assert len(set(check_commands(job))) == 2
        check_terminal(job, monkeypatch)
        check_ports_and_stacks(job, hosts)
        check_admin(job)
        check_mounts(job, tmp_path, f"/tmp/{name}")
        assert [*hosts.spawn("first", Trainer).imported.call("greeting", "TEXT").get(timeout=60).values()] == [
            "first"
        ] * 2
        (project / "greeting.py").write_text("TEXT = 'second'\n")
        wait_for(
            lambda: (
                set(hosts.spawn("next", Trainer).imported.call("greeting", "TEXT").get(timeout=60).values())
                == {"second"}
            ),
            "a save to reach the nodes",
        )
        job.exec(["rm", "-r", f"/tmp/{name}-out"])
        check_telemetry(job)
