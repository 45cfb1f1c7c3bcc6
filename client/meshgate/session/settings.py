"""The settings of a client, their defaults, and the environment variables that set them.

``MESHGATE_<FIELD>`` sets a field; an argument in the program takes precedence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_SWITCH = {"on": True, "off": False}


def _switch(value: object) -> object:
    return _SWITCH.get(value.lower(), value) if isinstance(value, str) else value


class ClientSettings(BaseModel):
    """Settings of one client; times in seconds, sizes in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    output: Annotated[bool, BeforeValidator(_switch)] = True
    """Whether to print the actors' output on this terminal."""
    log_dir: Annotated[str, Field(min_length=1)] | None = None
    """Where each rank's output is written, printed or not: ``log_dir/MESH/RANK.log``."""
    results: Literal["any", "data"] = "any"
    """``data``: results may contain data types only, so that a worker cannot run code on this machine."""
    connect_timeout: Seconds = 30.0
    """How long the first connection may take, over all attempts."""
    attempt_timeout: Seconds = 10.0
    """How long the first attempt to connect may take. The next one may take twice as long after each that timed out."""
    attempt_timeout_most: Seconds = 80.0
    """Upper bound of how long any attempt to connect may take."""
    lease: Seconds = 14_400.0
    """How long to try to reconnect after a cut. The gateway keeps the session for the length of its own lease."""
    lost_after: Seconds = 2.0
    """How long to wait before GatewayLostError for a gateway that the dialer reports as gone."""
    quiet: Seconds = 5.0
    """Reconnecting within this time is not even logged at level INFO."""
    retry_first: Seconds = 0.05
    """Upper bound of the first delay before reconnecting. It doubles each time; each delay is random below it."""
    retry_most: Seconds = 5.0
    """Upper bound of every delay before reconnecting."""
    close_timeout: Seconds = 7.0
    """How long closing waits for the gateway to stop the session's processes."""
    queue_limit: Annotated[int, Field(ge=1 << 16)] = 256 << 20
    """A call blocks while more than this waits to be sent. One call may always exceed it."""

    @classmethod
    def load(cls, environment: Mapping[str, str] | None = None, **overrides: Any) -> ClientSettings:
        """The settings of this process. Raises ValueError, which names the invalid variable or argument."""
        environment = os.environ if environment is None else environment
        variables = {name: f"MESHGATE_{name.upper()}" for name in cls.model_fields}
        values: dict[str, Any] = {
            name: environment[variable] for name, variable in variables.items() if environment.get(variable)
        }
        values |= {name: value for name, value in overrides.items() if value is not None}
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            field = str(first["loc"][0]) if first["loc"] else ""
            source = field if overrides.get(field) is not None else variables.get(field, field)
            raise ValueError(f"{source}={first['input']!r} is not a valid setting: {first['msg']}") from error
