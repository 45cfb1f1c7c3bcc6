"""DistributedDataParallel with real torch on the pods of a cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshgate import Compute, Image, KubernetesJob, SPMDFailed
from meshgate.spmd import serve
from tests.programs import DDP, check_equal_weights


@pytest.fixture(scope="session")
def torch_image() -> str:
    name = os.environ.get("MESHGATE_TORCH_IMAGE")
    assert name, 'MESHGATE_TORCH_IMAGE not set: run eval "$(tests/kubernetes/images)" first'
    return name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ddp_ends_with_equal_weights_on_eight_pods(
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    torch_image: str,
) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    monkeypatch.chdir(tmp_path)
    compute = Compute(cpu="100m", memory="1Gi", replicas=8, image=Image("torch").from_docker(torch_image))
    pods = KubernetesJob(compute=compute, namespace=namespace, sync_dirs=[str(tmp_path)])
    with serve(["torchrun", "--nproc-per-node=1", "ddp.py"], job=pods) as job:
        job.run_spmd()
        check_equal_weights(capfd.readouterr().out, ranks=8)
        with pytest.raises(SPMDFailed, match=r"rank 2 on .*-2 .*ValueError: bad batch"):
            serve(["torchrun", "ddp.py", "--fail"], job=pods).run_spmd()
