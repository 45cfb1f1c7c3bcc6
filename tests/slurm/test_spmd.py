"""DistributedDataParallel with real torch on the nodes of a Slurm cluster. Left out if torch is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from meshgate import SlurmJob, SPMDFailed
from meshgate.spmd import serve
from tests.programs import DDP, check_equal_weights

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ddp_ends_with_equal_weights_on_all_four_nodes(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    disturbed_node: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    monkeypatch.chdir(tmp_path)
    nodes = SlurmJob(
        {"workers": 4},
        job_name=name,
        exclusive=False,
        mem="3G",
        time_limit="10",
        log_dir=str(tmp_path / "logs"),
        sync_dirs=[str(tmp_path)],
    )
    with serve(["torchrun", "--nproc-per-node=2", "ddp.py"], job=nodes) as job:
        job.run_spmd()
        hosts = check_equal_weights(capfd.readouterr().out, 8)
        assert hosts == ["n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4"]
        with pytest.raises(SPMDFailed, match=r"rank 2 on .* .*ValueError: bad batch"):
            serve(["torchrun", "ddp.py", "--fail"], job=nodes).run_spmd()
