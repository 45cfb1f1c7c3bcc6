"""What the gateway can be told, by flags and by the environment, checked before anything starts.

A mistake ends the program with exit code 2 and one readable line for each. The token is never a flag: the
arguments of a process can be read by every user of its machine.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, CliSuppress, NoDecode, SettingsConfigDict, SettingsError

__all__ = ["LocalMesh", "Settings", "StaticMesh", "load_settings"]

PROGRAM = "meshgate_gateway"
MESH_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")
MAX_LOCAL_HOSTS = 1024
MIN_TOKEN_LENGTH = 16


class StaticMesh(BaseModel):
    """Hosts that are there already, by their Monarch addresses."""

    model_config = ConfigDict(frozen=True)
    name: str
    addresses: tuple[str, ...]


class LocalMesh(BaseModel):
    """Hosts that the gateway starts here and ends with itself."""

    model_config = ConfigDict(frozen=True)
    name: str
    count: int = Field(ge=1, le=MAX_LOCAL_HOSTS)


def _groups(given: object, form: str) -> list[tuple[str, list[str]]]:
    """``name=a,b,other=c`` as [(name, [a, b]), (other, [c])]: a part without a name belongs to the one before."""
    groups: list[tuple[str, list[str]]] = []
    for part in str(given).split(","):
        name, equals, value = part.strip().partition("=")
        if equals and MESH_NAME.fullmatch(name):
            groups.append((name, [value]))
        elif groups and part.strip():
            groups[-1][1].append(part.strip())
        else:
            raise ValueError(f"{part.strip()!r} is not of the form {form}")
    names = [name for name, _ in groups]
    if len(set(names)) < len(names):
        raise ValueError("a mesh is named twice")
    return groups


def _static_meshes(given: object) -> object:
    if not isinstance(given, str):
        return given
    groups = _groups(given, "NAME=ADDRESS,ADDRESS")
    for name, addresses in groups:
        if any("://" not in address for address in addresses):
            raise ValueError(f"mesh {name} has an address without a scheme: use tcp://HOST:PORT or ipc://PATH")
    return [StaticMesh(name=name, addresses=tuple(addresses)) for name, addresses in groups]


def _local_meshes(given: object) -> object:
    if not isinstance(given, str):
        return given
    groups = _groups(given, "NAME=COUNT")
    for name, counts in groups:
        if len(counts) != 1 or not counts[0].isdecimal() or not 1 <= int(counts[0]) <= MAX_LOCAL_HOSTS:
            raise ValueError(f"mesh {name} needs a number of hosts, 1 to {MAX_LOCAL_HOSTS}: {name}=2")
    return [LocalMesh(name=name, count=int(counts[0])) for name, counts in groups]


class Settings(BaseSettings):
    """Holds the sessions of a job and drives its Monarch hosts. Every flag may also be given as an environment
    variable, --log-level as MESHGATE_LOG_LEVEL. The token that clients present comes from MESHGATE_TOKEN or from
    --token-file, never from a flag.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        env_prefix="MESHGATE_",
        env_ignore_empty=True,
        extra="ignore",
        cli_prog_name=PROGRAM,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        hide_input_in_errors=True,
    )

    host: str = Field("127.0.0.1", description="address to listen at; 0.0.0.0 for all")
    port: int = Field(0, ge=0, le=65535, description="port to listen at; 0 takes a free one")
    local_socket: bool = Field(
        False, description="listen at a unix socket too, named in the announcement: a shorter way from this machine"
    )
    token: CliSuppress[SecretStr | None] = None
    token_file: Path | None = Field(None, description="file whose content is the token")
    mesh: Annotated[tuple[StaticMesh, ...], NoDecode, BeforeValidator(_static_meshes)] = Field(
        (), description="hosts that run already: NAME=ADDRESS,ADDRESS (may be given again)"
    )
    local_mesh: Annotated[tuple[LocalMesh, ...], NoDecode, BeforeValidator(_local_meshes)] = Field(
        (), description="hosts to start here and to end with the gateway: NAME=COUNT (may be given again)"
    )
    kubernetes_job: str | None = Field(
        None, description="name of the Kubernetes job whose gateway this is: its worker pods are the hosts"
    )
    provision_policy: Path | None = Field(
        None, description="in Kubernetes: a policy (JSON) by which jobs are made for callers without rights"
    )
    lease: float = Field(14400, gt=0, allow_inf_nan=False, description="seconds that a session outlives its connection")
    idle_timeout: float = Field(
        0, ge=0, allow_inf_nan=False, description="seconds without a session until the gateway ends; 0: never"
    )
    max_sessions: int = Field(64, ge=1, description="sessions at a time")
    warm_engines: int = Field(1, ge=0, le=8, description="engines started ahead of the session they will serve")
    lifetime_fd: int | None = Field(None, ge=0, description="end when this descriptor reaches end of file")
    announce_fd: int | None = Field(None, ge=0, description="write one line of JSON here when serving")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity to log")
    log_format: Literal["json", "text"] = Field("text", description="one JSON object a line, or text to read")

    @model_validator(mode="before")
    @classmethod
    def _explain_service_links(cls, given: Any) -> Any:
        port = given.get("port") if isinstance(given, dict) else None
        if isinstance(port, str) and "://" in port:
            raise ValueError(
                "MESHGATE_PORT holds what Kubernetes injects for a Service named meshgate, not a port: "
                "set enableServiceLinks: false in the pod"
            )
        return given

    @model_validator(mode="after")
    def _check(self) -> Settings:
        if self.token is not None and self.token_file is not None:
            raise ValueError("the token is given twice: keep MESHGATE_TOKEN or --token-file")
        if clash := {mesh.name for mesh in self.mesh} & {mesh.name for mesh in self.local_mesh}:
            raise ValueError(f"mesh {min(clash)} is given by --mesh and by --local-mesh: rename one")
        self.read_token()
        return self

    def read_token(self) -> SecretStr:
        """The token, from whichever place was named. Raises ValueError where there is none to be had."""
        token = self.token.get_secret_value() if self.token else None
        if self.token_file is not None:
            try:
                token = self.token_file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"--token-file {self.token_file} cannot be read: {error}") from None
        if not token:
            raise ValueError("a token is required: set MESHGATE_TOKEN or name a file with --token-file")
        if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError(f"the token must be at least {MIN_TOKEN_LENGTH} printable ASCII characters, no spaces")
        return SecretStr(token)


def load_settings(arguments: Sequence[str]) -> Settings:
    """Reads the flags ``arguments`` and the environment; on a mistake tells it and exits with code 2."""
    if any(argument == "--token" or argument.startswith("--token=") for argument in arguments):
        _refuse(["--token: a flag can be read by every user of this machine: set MESHGATE_TOKEN instead"])
    try:
        return Settings(_cli_parse_args=_joined(arguments))  # type: ignore[call-arg]
    except ValidationError as error:
        _refuse([_line(problem["loc"], problem["msg"]) for problem in error.errors(include_url=False)])
    except SettingsError as error:
        _refuse([str(error)])


def _joined(arguments: Sequence[str]) -> list[str]:
    """``--mesh a --mesh=b`` as ``--mesh=a,b``: what a repeated flag means otherwise depends on pydantic-settings."""
    rest: list[str] = []
    given: dict[str, list[str]] = {"--mesh": [], "--local-mesh": []}
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        following = None if flag not in given else value if equals else next(remaining, None)
        if following is None:
            rest.append(argument)
        else:
            given[flag].append(following)
    return [*rest, *(f"{flag}={','.join(values)}" for flag, values in given.items() if values)]


def _line(location: tuple[int | str, ...], message: str) -> str:
    message = message.removeprefix("Value error, ")
    if not location:
        return message
    flag = str(location[0]).replace("_", "-")
    return f"--{flag}: {message[:1].lower()}{message[1:]}"


def _refuse(lines: Sequence[str]) -> NoReturn:
    for line in lines:
        print(f"{PROGRAM}: {line}", file=sys.stderr)  # noqa: T201  (the program's own message, before any log)
    print(f"{PROGRAM}: --help explains every setting", file=sys.stderr)  # noqa: T201
    raise SystemExit(2)
