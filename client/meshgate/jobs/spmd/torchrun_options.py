"""The options of torchrun: each is honored, or refused by its name with the reason.

A test compares the table with the parser of the installed torch. An option that a newer torch adds is unknown here, so
the parser refuses it by name too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

PET_PREFIX = "PET_"  # torchrun takes the default of an option from the variable PET_<its name>


@dataclass(frozen=True, slots=True)
class Option:
    """``refused`` says why a value other than the default is refused; it is None for an option that is honored.
    ``from_environment``: a variable named after the option replaces its default."""

    flags: tuple[str, ...]
    default: Any = None
    type: Callable[[str], Any] = str
    is_flag: bool = False
    choices: tuple[str, ...] | None = None
    refused: str | None = None
    from_environment: bool = True

    @property
    def name(self) -> str:
        return next(flag for flag in self.flags if flag.startswith("--"))

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


def _option(name: str, default: Any = None, *, short: str | None = None, **fields: Any) -> Option:
    flags = [f"--{name}", *([f"--{name.replace('-', '_')}"] if "-" in name else [])]
    return Option(flags=tuple([short, *flags] if short else flags), default=default, **fields)


def _flag(name: str, *, short: str | None = None, refused: str | None = None) -> Option:
    return _option(name, False, short=short, is_flag=True, refused=refused)


def comma_separated(value: str) -> list[str]:
    """The items of ``a,b``; a doubled comma stands for a comma."""
    return [item.replace("\0", ",") for item in value.replace(",,", "\0").split(",")]


_ALL_START_TOGETHER = "the gateway starts all ranks together, so there is no rendezvous to configure"
_EACH_HOST = "it is a setting of one host, and this command describes all hosts of the job"

OPTIONS: tuple[Option, ...] = (
    _option("nnodes", "1:1"),
    _option("nproc-per-node", "1"),
    _option("rdzv-backend", "static"),
    _option("rdzv-endpoint", ""),
    _option("rdzv-id", "none"),
    _option("rdzv-conf", "", refused=_ALL_START_TOGETHER),
    _flag("standalone"),
    _option("max-restarts", 0, type=int),
    _option("monitor-interval", 0.1, type=float),  # exits are noticed at once, which is within any interval
    _option("start-method", "spawn", choices=("spawn", "fork", "forkserver")),  # torchrun: for functions, not scripts
    _option("event-log-handler", "null", refused="events are not logged; a failed run raises SPMDFailed"),
    _option("role", "default"),
    _flag("module", short="-m"),
    _flag("no-python"),
    _flag("run-path"),
    _option("log-dir"),
    _option("redirects", "0", short="-r"),
    _option("tee", "0", short="-t"),
    _option("local-ranks-filter", ""),
    _option("duplicate-stdout-filters", [], type=comma_separated, refused="use --tee, and filter its files"),
    _option("duplicate-stderr-filters", [], type=comma_separated, refused="use --tee, and filter its files"),
    _option("node-rank", 0, type=int, refused=_EACH_HOST),
    _option("master-addr", "127.0.0.1"),
    _option("master-port", type=int),
    _option("local-addr", refused=f"{_EACH_HOST}; --master-addr sets the address of rank 0"),
    _option("logs-specs", from_environment=False, refused="plugins for log files are not loaded; use --log-dir"),
    _option(
        "numa-binding",
        choices=("node", "socket", "exclusive", "core-complex"),
        from_environment=False,
        refused="processes are not bound to processors; bind them in the script, or by the job's scheduler",
    ),
    _option(
        "signals-to-handle",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        refused="no signal reaches the ranks from outside; a run that ends sends SIGTERM",
    ),
    _option("shutdown-timeout", type=int),
    _flag("virtual-local-rank"),
)


class _Parser(argparse.ArgumentParser):
    """Raises ValueError instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"torchrun command: {message}") from None  # without the frames of argparse


def parse_options(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[dict[str, Any], set[str]]:
    """The values of all options, with ``training_script`` and ``training_script_args``, and the names of the options
    that the command or the environment gives. Raises ValueError on what torchrun rejects and on refused options."""
    parser = _Parser(prog="torchrun", add_help=False)
    for option in OPTIONS:
        if option.is_flag:
            parser.add_argument(*option.flags, action="store_true", default=argparse.SUPPRESS)
        else:
            parser.add_argument(*option.flags, type=option.type, choices=option.choices, default=argparse.SUPPRESS)
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    values = {**_from_environment(environment), **vars(parser.parse_args(list(arguments)))}
    given = set(values)
    for option in OPTIONS:
        value = values.setdefault(option.dest, option.default)
        if option.refused is not None and value != option.default:
            raise ValueError(f"torchrun {option.name}={value} is not supported: {option.refused}")
    return values, given


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in OPTIONS:
        variable = f"{PET_PREFIX}{option.dest.upper()}"
        if not option.from_environment or variable not in environment:
            continue
        text = environment[variable]
        try:
            values[option.dest] = bool(int(text)) if option.is_flag else option.type(text)
        except ValueError:
            raise ValueError(f"the variable {variable}={text!r} is not a value for torchrun {option.name}") from None
        if option.choices is not None and text not in option.choices:
            raise ValueError(f"the variable {variable}={text!r} must be one of {', '.join(option.choices)}")
    return values
