"""Reads a torchrun command. Pure: a list of strings in, a ``TorchrunCommand`` out, or a ValueError that says what to
change."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

ProgramKind = Literal["script", "module", "executable", "run_path"]
TORCHRUN_MODULES = ("torch.distributed.run", "torchrun")
PYTHON = re.compile(r"python(3(\.\d+)?)?")
DEFAULT_SHUTDOWN_TIMEOUT = 30  # seconds, torchrun's
SHUTDOWN_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
DEVICE_COUNTS = ("auto", "cpu", "gpu", "xpu")
FORMS = "torchrun …, torch.distributed.run …, python -m torchrun …, python -m torch.distributed.run …, python script …"
PET_PREFIX = "PET_"  # torchrun takes the default of an option from the variable PET_<its name>


@dataclass(frozen=True, slots=True)
class TorchrunCommand:
    """What a command asks for.

    ``nodes`` is the range of the number of hosts; None: all hosts of the job. ``processes`` is the number on each host,
    or the kind of device to count there. ``redirects`` and ``tee`` are sums of 1 (stdout) and 2 (stderr), for all local
    ranks or by local rank. ``master_port`` 0 means a free one.
    """

    kind: ProgramKind
    program: str
    arguments: tuple[str, ...] = ()
    nodes: tuple[int, int] | None = None
    processes: int | str = 1
    run_id: str = "none"
    role: str = "default"
    max_restarts: int = 0
    master_address: str | None = None
    master_port: int = 0
    log_directory: str | None = None
    redirects: int | Mapping[int, int] = 0
    tee: int | Mapping[int, int] = 0
    shown_local_ranks: frozenset[int] | None = None
    shutdown_timeout: int = DEFAULT_SHUTDOWN_TIMEOUT
    virtual_local_rank: bool = False

    def nodes_of(self, available: int) -> int:
        """How many of a job's hosts to use. Raises ValueError if there are too few."""
        if self.nodes is None:
            return available
        least, most = self.nodes
        if available < least:
            wanted = str(least) if least == most else f"{least}:{most}"
            hosts = "1 host" if available == 1 else f"{available} hosts"
            raise ValueError(f"torchrun --nnodes={wanted}: the job has {hosts}")
        return min(most, available)


def is_command(word: str) -> bool:
    """Whether ``word`` is the first of a command that ``parse_command`` reads."""
    name = os.path.basename(word)
    return name in TORCHRUN_MODULES or PYTHON.fullmatch(name) is not None


def parse_command(command: Sequence[str], environment: Mapping[str, str] | None = None) -> TorchrunCommand:
    """Reads ``command``, with defaults from ``PET_*`` variables of ``environment`` (default: this process's), as
    torchrun does. Raises ValueError, which names the option, and TypeError if the command is not a list of strings."""
    if isinstance(command, str) or not all(isinstance(part, str) for part in command):
        raise TypeError(f"the command must be a list of strings, such as ['torchrun', 'train.py'], not {command!r}")
    if not command:
        raise ValueError("the command is empty: pass a list such as ['torchrun', '--nproc-per-node=4', 'train.py']")
    environment = os.environ if environment is None else environment
    first, rest = os.path.basename(command[0]), list(command[1:])
    if first in TORCHRUN_MODULES:
        return _torchrun(rest, environment)
    if PYTHON.fullmatch(first) is None:
        raise ValueError(f"unknown command {command[0]!r}: expected one of {FORMS}")
    if rest[:1] == ["-u"]:
        rest = rest[1:]
    if len(rest) >= 2 and rest[0] == "-m" and rest[1] in TORCHRUN_MODULES:
        return _torchrun(rest[2:], environment)
    return _python(rest)


def _python(rest: Sequence[str]) -> TorchrunCommand:
    """``python script …`` or ``python -m module …``: one process on each host."""
    kind: ProgramKind = "module" if rest[:1] == ["-m"] else "script"
    words = rest[1:] if kind == "module" else rest
    if not words:
        raise ValueError("the python command names no script: expected python script … or python -m module …")
    if words[0].startswith("-"):
        raise ValueError(f"option {words[0]} of python is not supported: set it in the script, or use a variable")
    return TorchrunCommand(kind, words[0], tuple(words[1:]))


def _torchrun(arguments: Sequence[str], environment: Mapping[str, str]) -> TorchrunCommand:
    values, given = parse_options(arguments, environment)
    nodes = _nodes(values["nnodes"]) if "nnodes" in given else None
    if values["standalone"]:
        if nodes not in (None, (1, 1)):
            raise ValueError(f"torchrun --standalone runs on one host, but --nnodes={values['nnodes']}")
        nodes = (1, 1)
    if values["max_restarts"] < 0:
        raise ValueError(f"torchrun --max-restarts={values['max_restarts']}: must not be negative")
    address, port = _master(values, given)
    timeout = values["shutdown_timeout"]
    if timeout is None:
        timeout = _number(SHUTDOWN_TIMEOUT_VARIABLE, environment.get(SHUTDOWN_TIMEOUT_VARIABLE, "30"))
    return TorchrunCommand(
        kind=_kind(values),
        program=values["training_script"],
        arguments=tuple(values["training_script_args"]),
        nodes=nodes,
        processes=_processes(values["nproc_per_node"]),
        run_id=values["rdzv_id"],
        role=values["role"],
        max_restarts=values["max_restarts"],
        master_address=address,
        master_port=port,
        log_directory=values["log_dir"],
        redirects=_streams("--redirects", values["redirects"]),
        tee=_streams("--tee", values["tee"]),
        shown_local_ranks=_ranks(values["local_ranks_filter"]),
        shutdown_timeout=timeout,
        virtual_local_rank=values["virtual_local_rank"],
    )


def _kind(values: Mapping[str, Any]) -> ProgramKind:
    if values["run_path"]:
        return "run_path"
    if values["no_python"]:
        if values["module"]:
            raise ValueError("torchrun --no-python and --module exclude each other: remove one")
        return "executable"
    return "module" if values["module"] else "script"


def _nodes(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        nodes = int(least), int(most or least)
    except ValueError:
        raise ValueError(f"torchrun --nnodes={text}: expected a number or MIN:MAX") from None
    if not 0 < nodes[0] <= nodes[1]:
        raise ValueError(f"torchrun --nnodes={text}: expected 0 < MIN <= MAX")
    return nodes


def _processes(text: str) -> int | str:
    if text in DEVICE_COUNTS:
        return text
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(
            f"torchrun --nproc-per-node={text}: expected a number, at least 1, or one of {', '.join(DEVICE_COUNTS)}"
        )
    return count


def _master(values: Mapping[str, Any], given: set[str]) -> tuple[str | None, int]:
    """The address and port where rank 0 serves, as far as the command gives them. ``--standalone`` replaces them."""
    backend, endpoint = values["rdzv_backend"], values["rdzv_endpoint"]
    if values["standalone"]:
        return None, 0
    if backend not in ("static", "c10d"):
        raise ValueError(
            f"torchrun --rdzv-backend={backend} is not supported: the gateway brings the ranks together. Use static or "
            "c10d, or remove the option"
        )
    if endpoint:
        return _endpoint(endpoint)
    address = values["master_addr"] if "master_addr" in given else None
    return _address("--master-addr", address), _port("--master-port", values["master_port"] or 0)


def _endpoint(text: str) -> tuple[str | None, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, ""
    number = _number("torchrun --rdzv-endpoint", port) if port else 0
    return _address("--rdzv-endpoint", host), _port("--rdzv-endpoint", number)


def _address(option: str, text: str | None) -> str | None:
    if text is None:
        return None
    address = text.removeprefix("[").removesuffix("]")
    if not address or any(character.isspace() for character in address):
        raise ValueError(f"torchrun {option}: {text!r} is not an address")
    return address


def _port(option: str, number: int) -> int:
    if not 0 <= number <= 65535:
        raise ValueError(f"torchrun {option}: {number} is not a port")
    return number


def _streams(option: str, text: str) -> int | Mapping[int, int]:
    """``3`` or ``0:1,1:2``: which streams of all local ranks, or of some."""
    if re.fullmatch("[0-3]", text):
        return int(text)
    if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        return {int(rank): int(which) for rank, which in (part.split(":") for part in text.split(","))}
    raise ValueError(f"torchrun {option}={text}: expected 0, 1, 2 or 3, or them by local rank, as in 0:1,1:2")


def _ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    return frozenset(_number("torchrun --local-ranks-filter", part) for part in text.split(","))


def _number(what: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{what}: {text!r} is not a number")
    return int(text)


# A test compares the table with the parser of the installed torch. An option that a newer torch adds is unknown here,
# so the parser refuses it by name too.


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


def _flag(name: str, *, short: str | None = None) -> Option:
    return _option(name, False, short=short, is_flag=True)


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
