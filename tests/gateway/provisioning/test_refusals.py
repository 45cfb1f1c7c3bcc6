"""What the policies for Kubernetes and Slurm have in common; what each refuses is in their own tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshgate_gateway.provisioning.policy import Policy
from meshgate_gateway.provisioning.refusals import (
    job_not_allowed,
    not_allowed,
    read_policy_file,
    session_violations,
)
from meshgate_gateway.provisioning.slurm_policy import SlurmPolicy


def test_a_value_needs_an_allowed_pattern_and_the_form() -> None:
    values = ["team-a", "other", "team-b --uid=0"]
    assert list(not_allowed("queue", values, ("team-*",))) == ["queue 'other' is not allowed (allowed: team-*)"]
    assert list(not_allowed("queue", values, ("team-*",), re.compile(r"[a-z-]+"))) == [
        "queue 'other' is not allowed (allowed: team-*)",
        "queue 'team-b --uid=0' is not allowed (allowed: team-*)",
    ]
    assert list(not_allowed("queue", ["a"], ())) == ["queue 'a' is not allowed (allowed: none)"]


@pytest.mark.parametrize("policy", [Policy(gateway_image="gateway", max_idle=60), SlurmPolicy(max_idle=60)])
def test_a_job_may_not_stay_longer_than_the_policy_says(policy: Policy | SlurmPolicy) -> None:
    assert list(session_violations(policy, 60, 86_400)) == []
    assert list(session_violations(policy, 0, 86_401)) == [
        "idle_timeout 0 (never) exceeds the limit of 60 s",
        "lease 86401 s exceeds the limit of 86400 s",
    ]
    assert list(session_violations(policy, 1_000_000, 1)) == ["idle_timeout 1000000 s exceeds the limit of 60 s"]


def test_a_refusal_has_all_problems() -> None:
    assert job_not_allowed(["a", "b"]) == "the policy of this gateway does not allow this job: a; b"
    assert job_not_allowed([]) is None


def test_an_invalid_policy_is_refused_without_its_values(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    with pytest.raises(ValueError, match="cannot read the policy"):
        read_policy_file(path, SlurmPolicy)
    path.write_text('{"max_nodes": "a secret"}')
    with pytest.raises(ValueError, match=r"invalid policy .*: max_nodes: ") as raised:
        read_policy_file(path, SlurmPolicy)
    assert "secret" not in str(raised.value)
