"""Each option of torchrun is honored or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from meshgate.jobs.spmd.torchrun_options import OPTIONS, comma_separated, parse_options


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
