"""Sessions on a cluster that outlive their driver, which runs in a network of its own and reaches only nginx."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from meshgate import Compute, KubernetesJob
from tests.kubernetes.cluster import Kubectl
from tests.kubernetes.network import ingress
from tests.programs import ROOT

KILLS = int(os.environ.get("MESHGATE_TEST_KILLS", "5"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_driver_that_is_killed_at_random_points_loses_nothing(
    namespace: str, kubectl: Kubectl, tmp_path: Path
) -> None:
    """More kills: MESHGATE_TEST_KILLS=100."""
    with KubernetesJob(compute=Compute(), name="killed", namespace=namespace) as job:
        job.apply()
        with ingress(job, kubectl, tmp_path) as (place, _, environment):
            arguments = ["-m", "tests.end_to_end.killed_driver", "--kills", str(KILLS)]
            environment["PYTHONPATH"] = str(ROOT)
            output = place.run_python(*arguments, environment=environment, timeout=60 + 15 * KILLS)
    print(output)
    outcome = json.loads(output.splitlines()[-1])
    assert outcome["kills"] == KILLS
    assert outcome["calls"] > 0
