"""A torchrun command is read completely, or refused with what to change."""

from __future__ import annotations

from typing import Any

import pytest

from meshgate.jobs.spmd.torchrun import OPTIONS, TorchrunCommand, comma_separated, parse_command, parse_options


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


def test_the_table_has_every_option_of_the_installed_torchrun() -> None:
    run = pytest.importorskip("torch.distributed.run", reason="torch is not installed: the table is not compared")
    theirs = {
        tuple(action.option_strings): (action.dest, action.default, action.nargs == 0, action.choices)
        for action in run.get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    }
    ours: dict[tuple[str, ...], tuple[Any, ...]] = {
        option.flags: (option.dest, option.default, option.is_flag, list(option.choices) if option.choices else None)
        for option in OPTIONS
    }
    assert ours == theirs


def test_without_options_the_values_are_the_defaults() -> None:
    values, given = parse_options(["train.py", "--lr", "1"], {})
    assert given == {"training_script", "training_script_args"}
    assert values["training_script_args"] == ["--lr", "1"]
    for option in OPTIONS:
        assert values[option.dest] == option.default


REFUSED = {
    "rdzv-conf": "timeout=3",
    "event-log-handler": "console",
    "duplicate-stdout-filters": "loss",
    "duplicate-stderr-filters": "loss",
    "node-rank": "1",
    "local-addr": "10.0.0.1",
    "logs-specs": "mine",
    "numa-binding": "node",
    "signals-to-handle": "SIGUSR1",
}


def test_the_refused_options_are_all_tried() -> None:
    assert set(REFUSED) == {option.name.removeprefix("--") for option in OPTIONS if option.refused is not None}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_option_is_named_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match=rf"torchrun --{name}=.* is not supported: \w+"):
        parse_options([f"--{name}={REFUSED[name]}", "train.py"], {})


@pytest.mark.parametrize("name", ["rdzv_conf", "node_rank"])
def test_a_refused_option_at_its_default_is_accepted(name: str) -> None:
    default = next(option.default for option in OPTIONS if option.dest == name)
    assert parse_options([f"--{name}={default}", "train.py"], {})[0][name] == default


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--unheard-of=1", "train.py"], "unrecognized arguments: --unheard-of=1"),
        (["--max-restarts=many", "train.py"], "--max-restarts/--max_restarts: invalid int value: 'many'"),
        (["--start-method=thread", "train.py"], "invalid choice: 'thread'"),
        (["--standalone"], "training_script"),
    ],
)
def test_what_torchrun_rejects_is_rejected_and_does_not_end_the_program(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_options(arguments, {})
    assert caught.value.__suppress_context__


def test_variables_replace_defaults_as_in_torchrun() -> None:
    values, given = parse_options(["train.py"], {"PET_NPROC_PER_NODE": "4", "PET_STANDALONE": "1", "PET_ROLE": "x"})
    assert (values["nproc_per_node"], values["standalone"], values["role"]) == ("4", True, "x")
    assert {"nproc_per_node", "standalone", "role"} <= given
    assert parse_options(["--role=y", "train.py"], {"PET_ROLE": "x"})[0]["role"] == "y"


@pytest.mark.parametrize(
    ("variable", "text"), [("PET_MAX_RESTARTS", "many"), ("PET_MODULE", "yes"), ("PET_START_METHOD", "thread")]
)
def test_an_invalid_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{variable}='{text}'"):
        parse_options(["train.py"], {variable: text})


def test_a_refused_option_is_refused_from_a_variable_too() -> None:
    with pytest.raises(ValueError, match="--node-rank=1 is not supported"):
        parse_options(["train.py"], {"PET_NODE_RANK": "1"})


def test_a_doubled_comma_stands_for_a_comma() -> None:
    assert comma_separated("a,b,,c") == ["a", "b,c"]
