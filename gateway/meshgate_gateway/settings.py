"""The settings of the gateway, from flags and environment variables, validated before anything starts.

Invalid settings end the program with exit code 2 and one line per error. The token is never a flag, because every user
of the machine can read the arguments of a process.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, CliSuppress, NoDecode, SettingsConfigDict, SettingsError

PROGRAM = "meshgate_gateway"
MESH_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")
MAX_LOCAL_HOSTS = 1024
MIN_TOKEN_LENGTH = 16
OF_JOB = "job"  # of --forward-to
_NOT_FORWARDING = (
    *("mesh", "local_mesh", "local_socket", "metrics_port", "behind_gateways"),
    *("slurm_job", "slurm_policy", "provision_policy"),
)


class StaticMesh(BaseModel):
    """Existing hosts, by their Monarch addresses."""

    model_config = ConfigDict(frozen=True)
    name: str
    addresses: tuple[str, ...]


class LocalMesh(BaseModel):
    """Hosts that the gateway starts on this machine and stops on shutdown."""

    model_config = ConfigDict(frozen=True)
    name: str
    count: int = Field(ge=1, le=MAX_LOCAL_HOSTS)


def _groups(value: object, form: str) -> list[tuple[str, list[str]]]:
    """``name=a,b,other=c`` as [(name, [a, b]), (other, [c])]: an item without a name belongs to the preceding one."""
    groups: list[tuple[str, list[str]]] = []
    for part in str(value).split(","):
        name, equals, item = part.strip().partition("=")
        if equals and MESH_NAME.fullmatch(name):
            groups.append((name, [item]))
        elif groups and part.strip():
            groups[-1][1].append(part.strip())
        else:
            raise ValueError(f"{part.strip()!r} is not of the form {form}")
    names = [name for name, _ in groups]
    if len(set(names)) < len(names):
        raise ValueError(f"mesh {next(name for name in names if names.count(name) > 1)} is given twice")
    return groups


def _static_meshes(value: object) -> object:
    if not isinstance(value, str):
        return value
    groups = _groups(value, "NAME=ADDRESS,ADDRESS")
    for name, addresses in groups:
        if any("://" not in address for address in addresses):
            raise ValueError(f"an address of mesh {name} has no scheme: use tcp://HOST:PORT or ipc://PATH")
    return [StaticMesh(name=name, addresses=tuple(addresses)) for name, addresses in groups]


def _local_meshes(value: object) -> object:
    if not isinstance(value, str):
        return value
    groups = _groups(value, "NAME=COUNT")
    for name, counts in groups:
        if len(counts) != 1 or not counts[0].isdecimal() or not 1 <= int(counts[0]) <= MAX_LOCAL_HOSTS:
            raise ValueError(f"the number of hosts of mesh {name} must be 1 to {MAX_LOCAL_HOSTS}, as in {name}=2")
    return [LocalMesh(name=name, count=int(counts[0])) for name, counts in groups]


class Settings(BaseSettings):
    """Serves the sessions of a job and drives its Monarch hosts. Every flag can also be set by an environment variable:
    --log-level by MESHGATE_LOG_LEVEL. The token that clients must present comes from MESHGATE_TOKEN or --token-file.
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

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: int = Field(0, ge=0, le=65535, description="port to listen on; 0 picks a free port")
    local_socket: bool = Field(
        False, description="also listen on a unix socket, named in the announcement; faster for clients on this machine"
    )
    metrics_port: int | None = Field(
        None, ge=1, le=65535, description="also serve /metrics on this port of --host, to everyone who can reach it"
    )
    token: CliSuppress[SecretStr | None] = None
    token_file: Path | None = Field(None, description="file that contains the token")
    mesh: Annotated[tuple[StaticMesh, ...], NoDecode, BeforeValidator(_static_meshes)] = Field(
        (), description="existing hosts of a mesh: NAME=ADDRESS,ADDRESS or NAME=IDENTITY@ADDRESS (repeatable)"
    )
    local_mesh: Annotated[tuple[LocalMesh, ...], NoDecode, BeforeValidator(_local_meshes)] = Field(
        (), description="hosts to start on this machine and stop with the gateway: NAME=COUNT (repeatable)"
    )
    kubernetes_job: str | None = Field(
        None, description="name of the Kubernetes job that this gateway serves; its worker pods are the hosts"
    )
    slurm_job: Path | None = Field(
        None, description="file that describes a Slurm job (JSON): submits it, serves it, and cancels it at the end"
    )
    provision_policy: Path | None = Field(
        None, description="in Kubernetes: a policy file (JSON); enables creating jobs for callers without permissions"
    )
    slurm_policy: Path | None = Field(
        None, description="on a login node of Slurm: a policy file (JSON); enables submitting jobs for other callers"
    )
    forward_to: str | None = Field(
        None,
        description="have no sessions: authenticate connections, and forward them to the gateway with "
        "--behind-gateways at HOST:PORT; job: to the pod with the engines of --kubernetes-job",
    )
    behind_gateways: bool = Field(
        False,
        description="accept only what gateways with --forward-to forward; the token is the key made of their token",
    )
    lease: float = Field(
        14400,
        gt=0,
        allow_inf_nan=False,
        description="seconds that a session outlives its connection; at most 1800 if the client had not fallen silent",
    )
    idle_timeout: float = Field(
        0,
        ge=0,
        allow_inf_nan=False,
        description="seconds without a session until the gateway shuts down; 0: never",
    )
    first_session: float = Field(
        60,  # a busy laptop may notice seconds late that its new job is ready
        ge=0,
        allow_inf_nan=False,
        description="seconds that the gateway waits for its first session, if that is longer than --idle-timeout",
    )
    max_sessions: int = Field(64, ge=1, description="maximum number of concurrent sessions")
    runs: bool = Field(True, description="run programs that callers submit, beside this gateway")
    warm_engines: int = Field(1, ge=0, le=8, description="number of engine processes to start ahead of their sessions")
    lifetime_fd: int | None = Field(None, ge=0, description="shut down when this file descriptor reaches end of file")
    announce_fd: int | None = Field(None, ge=0, description="file descriptor to write one line of JSON to once serving")
    remove_at_end: Path | None = Field(
        None, description="file or directory to remove after all processes of this gateway have ended"
    )
    log_output: bool = Field(False, description="write what actors print to standard output, as JSON lines")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="minimum severity to log")
    log_format: Literal["json", "text"] = Field("text", description="one JSON object per line, or text for people")

    @model_validator(mode="before")
    @classmethod
    def _explain_service_links(cls, values: Any) -> Any:
        port = values.get("port") if isinstance(values, dict) else None
        if isinstance(port, str) and "://" in port:
            raise ValueError(
                "MESHGATE_PORT is not a port but the variable that Kubernetes injects for a Service named meshgate: "
                "set enableServiceLinks: false in the pod"
            )
        return values

    @model_validator(mode="after")
    def _check(self) -> Settings:
        if self.token is not None and self.token_file is not None:
            raise ValueError("the token is given twice: remove MESHGATE_TOKEN or --token-file")
        if clash := {mesh.name for mesh in self.mesh} & {mesh.name for mesh in self.local_mesh}:
            raise ValueError(f"mesh {min(clash)} is given by both --mesh and --local-mesh: rename one")
        if self.slurm_policy is not None and (self.provision_policy is not None or self.slurm_job is not None):
            raise ValueError("--slurm-policy cannot be combined with --provision-policy or --slurm-job")
        if self.forward_to is not None:
            self._check_forwarding()
        self.read_token()
        return self

    def _check_forwarding(self) -> None:
        if self.forward_to != OF_JOB:
            self.forwarding_address()
        elif self.kubernetes_job is None:
            raise ValueError("--forward-to job needs --kubernetes-job, whose engines it looks for")
        for name in _NOT_FORWARDING:
            if getattr(self, name):
                raise ValueError(f"--forward-to cannot be combined with --{name.replace('_', '-')}: it has no sessions")

    def forwarding_address(self) -> tuple[str, int]:
        """That of ``--forward-to``. Raises ValueError."""
        try:
            parts = urlsplit(f"//{self.forward_to}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or not port:
            raise ValueError(f"--forward-to {self.forward_to!r} is neither HOST:PORT nor {OF_JOB}")
        return host, port

    def read_token(self) -> SecretStr:
        """The token from MESHGATE_TOKEN or the token file. Raises ValueError if it is missing or invalid."""
        token = self.token.get_secret_value() if self.token else None
        if self.token_file is not None:
            try:
                token = self.token_file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"--token-file {self.token_file} cannot be read: {error}") from None
        if not token:
            raise ValueError("no token: set MESHGATE_TOKEN or --token-file")
        if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError(
                f"invalid token: it needs at least {MIN_TOKEN_LENGTH} printable ASCII characters without spaces"
            )
        return SecretStr(token)


def load_settings(arguments: Sequence[str]) -> Settings:
    """Reads flags and environment. Reports invalid settings on stderr and exits with code 2."""
    if any(argument == "--token" or argument.startswith("--token=") for argument in arguments):
        _fail(["--token: every user of this machine could read it: set MESHGATE_TOKEN instead"])
    try:
        return Settings(_cli_parse_args=_joined(arguments))  # type: ignore[call-arg]
    except ValidationError as error:
        _fail([_line(problem["loc"], problem["msg"]) for problem in error.errors(include_url=False)])
    except SettingsError as error:
        _fail([str(error)])


def _joined(arguments: Sequence[str]) -> list[str]:
    """``--mesh a --mesh=b`` as ``--mesh=a,b``: otherwise pydantic-settings decides what a repeated flag means."""
    rest: list[str] = []
    repeatable: dict[str, list[str]] = {"--mesh": [], "--local-mesh": []}
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        following = None if flag not in repeatable else value if equals else next(remaining, None)
        if following is None:
            rest.append(argument)
        else:
            repeatable[flag].append(following)
    return [*rest, *(f"{flag}={','.join(values)}" for flag, values in repeatable.items() if values)]


def _line(location: tuple[int | str, ...], message: str) -> str:
    message = message.removeprefix("Value error, ")
    if not location:
        return message
    flag = str(location[0]).replace("_", "-")
    return f"--{flag}: {message[:1].lower()}{message[1:]}"


def _fail(lines: Sequence[str]) -> NoReturn:
    for line in lines:
        print(f"{PROGRAM}: {line}", file=sys.stderr)  # noqa: T201  (usage errors come before the log is set up)
    print(f"{PROGRAM}: --help lists all settings", file=sys.stderr)  # noqa: T201
    raise SystemExit(2)
