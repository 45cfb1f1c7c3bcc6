"""What a policy for Slurm jobs allows, and values that would become other options of sbatch."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from meshgate_gateway.provisioning.slurm_policy import SlurmPolicy, read_slurm_policy, slurm_violations
from meshgate_slurm.spec import SlurmSpec

POLICY = SlurmPolicy(
    partitions=("gpu*", "cpu"),
    accounts=("team",),
    pythons=("/home/*/bin/python",),
    options=("--constraint", "--reservation"),
    max_nodes=4,
    max_time="02:00:00",
    max_idle=600,
    max_lease=3600,
)
DIGEST = "0" * 64


def problems(*, batch: bool = False, policy: SlurmPolicy = POLICY, **spec: Any) -> list[str]:
    given: dict[str, Any] = {
        "meshes": {"a": 2}, "time_limit": "60", "idle_timeout": 600, "lease": 3600, "exclusive": False, **spec
    }  # fmt: skip
    return slurm_violations(policy, SlurmSpec.model_validate(given), batch=batch)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"partition": "gpu-a100,cpu", "account": "team"},
        {"python_exe": "/home/alice/bin/python", "log_dir": "~/logs/run_1"},
        {"slurm_args": ("--constraint=a100&nvlink", "--reservation=r1")},
        {"time_limit": "2:00:00", "meshes": {"a": 1, "b": 3}},
    ],
)
def test_what_the_policy_lists_is_allowed(spec: dict[str, Any]) -> None:
    assert problems(**spec) == []


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"meshes": {"a": 3, "b": 2}}, "5 nodes exceed the limit of 4"),
        ({"partition": "gpu,spot"}, "partition 'spot' is not allowed (allowed: gpu*, cpu)"),
        ({"partition": 'gpu" --qos="high'}, "partition 'gpu\" --qos=\"high' is not allowed"),
        ({"gateway_on": "node"}, "gateway_on 'node' is not allowed"),
        ({"account": "other"}, "account 'other' is not allowed"),
        ({"qos": "high"}, "qos 'high' is not allowed (allowed: none)"),
        ({"python_exe": "/usr/bin/python3"}, "python_exe '/usr/bin/python3' is not allowed"),
        ({"python_exe": "/home/a/../../tmp/bin/python"}, "is not allowed"),
        ({"log_dir": '/x" --qos="high'}, "use only letters"),
        ({"time_limit": None}, "time_limit must be set, to at most 02:00:00"),
        ({"time_limit": "121"}, "time_limit 121 exceeds the limit of 02:00:00"),
        ({"time_limit": "0"}, "time_limit 0 exceeds the limit"),  # Slurm's word for no limit
        ({"time_limit": "unlimited"}, "time_limit unlimited exceeds the limit"),
        ({"idle_timeout": 0}, "idle_timeout 0 (never) exceeds the limit of 600 s"),
        ({"lease": 3601}, "lease 3601 s exceeds the limit of 3600 s"),
        ({"slurm_args": ("--reservation=r1 --qos=high",)}, "is not allowed (allowed, as --option=value: --constraint"),
        ({"slurm_args": ("--nice=-5",)}, "slurm_args '--nice=-5' is not allowed"),
        ({"slurm_args": ("-C", "-xn1")}, "slurm_args '-C' is not allowed"),
    ],
)
def test_what_it_does_not_list_is_named(spec: dict[str, Any], problem: str) -> None:
    found = problems(**spec)
    assert found, "nothing was rejected"
    assert problem in "; ".join(found)


def test_batch_jobs_can_be_excluded() -> None:
    assert problems(batch=True) == []
    policy = POLICY.model_copy(update={"batch": False})
    assert problems(batch=True, policy=policy) == ["apply(client_script) is not allowed"]


def test_a_job_needs_no_time_limit_if_the_policy_has_none() -> None:
    assert problems(time_limit=None, policy=POLICY.model_copy(update={"max_time": None})) == []


def read(directory: Path, uid: int, **policy: Any) -> SlurmPolicy:
    file = directory / "policy.json"
    file.write_text(json.dumps(policy))
    return read_slurm_policy(file, uid)


def caller(**facts: Any) -> list[dict[str, Any]]:
    return [{"name": "alice", "token_sha256": DIGEST, **facts}]


def test_an_ordinary_gateway_submits_as_its_own_user(tmp_path: Path) -> None:
    own = pwd.getpwnam("daemon")
    for user in (None, "daemon"):
        assert read(tmp_path, own.pw_uid, callers=caller(user=user)).callers[0].user == user


@pytest.mark.parametrize(
    ("uid", "policy", "problem"),
    [
        (0, {"callers": caller()}, "caller 'alice': set user: this gateway runs as root, and no job may"),
        (0, {"callers": caller(user="root")}, "no job may run as root"),
        (0, {"callers": caller(user="no-such-user")}, "this machine has no user 'no-such-user'"),
        (99999, {"callers": caller(user="daemon")}, "only a gateway that runs as root can submit jobs as 'daemon'"),
        (99999, {"callers": caller() * 2}, "two have the same name"),
        (99999, {"options": ["--time"]}, "'--time' cannot be allowed"),
        (99999, {"options": ["--const*"]}, "list full names"),
        (99999, {"max_time": "a day"}, "max_time: Value error, not a time of Slurm's"),
        (99999, {"max_pods": 3}, "max_pods: Extra inputs are not permitted"),
    ],
)
def test_a_policy_that_cannot_hold_is_refused(tmp_path: Path, uid: int, policy: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match="invalid policy") as failed:
        read(tmp_path, uid, **policy)
    assert problem in str(failed.value)


def test_a_missing_policy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the policy .*none\.json"):
        read_slurm_policy(tmp_path / "none.json", os.getuid())
