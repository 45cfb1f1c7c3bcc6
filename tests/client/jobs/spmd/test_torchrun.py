"""A torchrun command is read completely, or refused with what to change."""

from __future__ import annotations

from typing import Any

import pytest

from meshgate.jobs.spmd.torchrun import TorchrunCommand, parse_command


def parse(*words: str, **environment: str) -> TorchrunCommand:
    return parse_command(words, environment)


@pytest.mark.parametrize(
    "start",
    [
        ["torchrun"],
        ["/opt/venv/bin/torchrun"],
        ["torch.distributed.run"],
        ["python", "-m", "torchrun"],
        ["python3.11", "-m", "torch.distributed.run"],
        ["python3", "-u", "-m", "torchrun"],
    ],
)
def test_every_way_to_call_torchrun_is_the_same(start: list[str]) -> None:
    expected = TorchrunCommand("module", "train", ("--lr", "0.001"), processes=8)
    assert parse(*start, "--nproc-per-node=8", "-m", "train", "--lr", "0.001") == expected


def test_plain_python_is_one_process_on_each_host() -> None:
    assert parse("python", "train.py", "--lr", "1") == TorchrunCommand("script", "train.py", ("--lr", "1"))
    assert parse("python", "-m", "pkg.train") == TorchrunCommand("module", "pkg.train")


def test_options_of_the_script_are_left_to_it() -> None:
    command = parse("torchrun", "train.py", "--nproc-per-node=4", "-m", "--standalone")
    assert command.arguments == ("--nproc-per-node=4", "-m", "--standalone")
    assert command.processes == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--nnodes=2"], {"nodes": (2, 2)}),
        (["--nnodes", "1:4"], {"nodes": (1, 4)}),
        (["--standalone"], {"nodes": (1, 1)}),
        (["--nproc_per_node", "auto"], {"processes": "auto"}),
        (["--no-python"], {"kind": "executable"}),
        (["--run-path"], {"kind": "run_path"}),
        (["--run-path", "--no-python"], {"kind": "run_path"}),
        (["--max-restarts=3"], {"max_restarts": 3}),
        (["--rdzv-id=run1", "--role=trainer"], {"run_id": "run1", "role": "trainer"}),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=n1:29400"], {"master_address": "n1", "master_port": 29400}),
        (["--rdzv-endpoint=[::1]:5"], {"master_address": "::1", "master_port": 5}),
        (["--rdzv-endpoint=n1"], {"master_address": "n1", "master_port": 0}),
        (["--master-addr=10.0.0.1", "--master-port=5000"], {"master_address": "10.0.0.1", "master_port": 5000}),
        (["--standalone", "--rdzv-endpoint=n1:3"], {"nodes": (1, 1), "master_address": None, "master_port": 0}),
        (["--log-dir=/logs", "-t", "3"], {"log_directory": "/logs", "tee": 3}),
        (["-r", "0:1,1:2"], {"redirects": {0: 1, 1: 2}}),
        (["--local-ranks-filter=0,2"], {"shown_local_ranks": frozenset({0, 2})}),
        (["--shutdown-timeout=5"], {"shutdown_timeout": 5}),
        (["--virtual-local-rank"], {"virtual_local_rank": True}),
        (["--monitor-interval=5", "--start-method=fork"], {}),
    ],
)
def test_options_are_honored(options: list[str], expected: dict[str, Any]) -> None:
    command = parse("torchrun", *options, "train.py")
    assert command == TorchrunCommand(**{"kind": "script", "program": "train.py", **expected})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the command is empty"),
        (["bash", "run.sh"], "unknown command 'bash': expected one of torchrun"),
        (["python"], "names no script"),
        (["python", "-X", "dev", "train.py"], "option -X of python is not supported"),
        (["torchrun", "--standalone", "--nnodes=2", "t.py"], "--standalone runs on one host, but --nnodes=2"),
        (["torchrun", "--nnodes=two", "t.py"], "--nnodes=two: expected a number"),
        (["torchrun", "--nnodes=3:2", "t.py"], "--nnodes=3:2: expected 0 < MIN <= MAX"),
        (["torchrun", "--nproc-per-node=0", "t.py"], "--nproc-per-node=0: expected a number, at least 1"),
        (["torchrun", "--nproc-per-node=many", "t.py"], "--nproc-per-node=many"),
        (["torchrun", "--max-restarts=-1", "t.py"], "--max-restarts=-1: must not be negative"),
        (["torchrun", "--rdzv-backend=etcd-v2", "t.py"], "--rdzv-backend=etcd-v2 is not supported"),
        (["torchrun", "--rdzv-endpoint=n1:http", "t.py"], "--rdzv-endpoint: 'http' is not a number"),
        (["torchrun", "--rdzv-endpoint=:29400", "t.py"], "--rdzv-endpoint: '' is not an address"),
        (["torchrun", "--master-port=70000", "t.py"], "--master-port: 70000 is not a port"),
        (["torchrun", "--tee=4", "t.py"], "--tee=4: expected 0, 1, 2 or 3"),
        (["torchrun", "--redirects=0:9", "t.py"], "--redirects=0:9: expected"),
        (["torchrun", "--local-ranks-filter=a", "t.py"], "--local-ranks-filter: 'a' is not a number"),
        (["torchrun", "--no-python", "-m", "t"], "--no-python and --module exclude each other"),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(*words)


def test_a_command_in_one_string_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a list of strings"):
        parse_command("torchrun train.py")


def test_the_shutdown_timeout_may_come_from_torchs_variable() -> None:
    assert parse("torchrun", "t.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").shutdown_timeout == 7
    with pytest.raises(ValueError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT: 'soon' is not a number"):
        parse("torchrun", "t.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="soon")


@pytest.mark.parametrize(("nnodes", "available", "used"), [(None, 3, 3), ("2", 3, 2), ("1:4", 3, 3), ("3:3", 3, 3)])
def test_nnodes_chooses_among_the_hosts_of_the_job(nnodes: str | None, available: int, used: int) -> None:
    options = [f"--nnodes={nnodes}"] if nnodes else []
    assert parse("torchrun", *options, "t.py").nodes_of(available) == used


def test_too_few_hosts_are_an_error() -> None:
    with pytest.raises(ValueError, match="--nnodes=2:4: the job has 1 host"):
        parse("torchrun", "--nnodes=2:4", "t.py").nodes_of(1)
