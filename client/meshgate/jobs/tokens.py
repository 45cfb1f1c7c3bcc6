"""The URL of a gateway, and the driver's token for it: from a variable, a file, a command or the pod."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from pydantic import AwareDatetime, BaseModel, ValidationError

from meshgate.errors import ConnectionFailedError, JobError
from meshgate_processes.identity import last_output

SERVICE_ACCOUNT_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
COMMAND_TIMEOUT = 120.0  # seconds: it may wait for a person who logs in
REUSED_FOR = 30.0  # seconds: `meshgate top` connects every two, and a command may take one of processor time
STDERR_SHOWN = 1000  # characters


def url_of_gateway() -> str | None:
    """``$MESHGATE_URL``, or ``$KT_API_URL`` as Kubetorch calls it; None if neither is set."""
    return os.environ.get("MESHGATE_URL") or os.environ.get("KT_API_URL") or None


def own_token() -> str:
    """The token for a gateway now: ``$MESHGATE_TOKEN``, the content of ``$MESHGATE_TOKEN_FILE``, or what
    ``$MESHGATE_TOKEN_COMMAND`` prints. Raises JobError.

    Files are renewed by others, before the token in them expires.
    """
    if token := _variable():
        return token
    if file := _variable("_FILE"):
        try:
            token = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(f"cannot read the token of MESHGATE_TOKEN_FILE={file}: {error}") from None
        if not token:
            raise JobError(f"the file of MESHGATE_TOKEN_FILE={file} is empty")
        return token
    if command := _variable("_COMMAND"):
        return _token_command(command).token()
    raise JobError("no token: set MESHGATE_TOKEN, MESHGATE_TOKEN_FILE or MESHGATE_TOKEN_COMMAND")


def find_token() -> str:
    """As ``own_token``, or the token of the pod's service account, for a gateway in a cluster. Raises JobError."""
    if not has_own_token():
        with contextlib.suppress(OSError):
            return SERVICE_ACCOUNT_TOKEN.read_text().strip()
    return own_token()


def has_own_token() -> bool:
    """Whether the environment says where the token for the gateway is."""
    return any(map(_variable, ("", "_FILE", "_COMMAND")))


def _variable(kind: str = "") -> str:
    return os.environ.get(f"MESHGATE_TOKEN{kind}", "").strip()


def token_to_dial(find: Callable[[], str] = find_token) -> str:
    """The token that ``find`` finds, for a connection: a file that is being replaced may be missing for a moment, and a
    command may fail until its user has logged in again."""
    try:
        return find()
    except JobError as error:
        raise ConnectionFailedError(str(error)) from None


def token_is_renewed() -> bool:
    """Whether the token that is found here is renewed. A variable changes only if this program sets it."""
    return not _variable()


class _Status(BaseModel):
    token: str
    expirationTimestamp: AwareDatetime | None = None


class _ExecCredential(BaseModel):
    """What a credential plugin of kubectl prints."""

    status: _Status


class _TokenCommand:
    """A command that prints a token or an ExecCredential.

    Its token is used again for ``REUSED_FOR`` seconds, or until it expires if that is sooner. So a session whose token
    has been rejected, which connects again and again, runs it after that time, whether the end of the token is known
    or not.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._running = threading.Lock()  # several connections may need the token at once
        self._token = ""
        # By the clock that goes on while a laptop sleeps. It may be set back, even by hours.
        self._reused_from = self._reused_until = 0.0

    def token(self) -> str:
        """Raises JobError."""
        with self._running:
            if not self._reused_from <= time.time() < self._reused_until:
                self._token, expires = self._read(self._run())
                self._reused_from = time.time()
                self._reused_until = min(self._reused_from + REUSED_FOR, expires)
            return self._token

    def _run(self) -> str:
        """What the command prints."""
        try:
            ran = subprocess.run(
                shlex.split(self._command),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMMAND_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise self._error(f"did not end within {COMMAND_TIMEOUT:g} s") from None
        except (OSError, ValueError) as error:  # ValueError: a quote without its other half
            raise self._error(f"cannot be run: {error}") from None
        if ran.returncode:
            said = last_output(ran.stderr.strip(), STDERR_SHOWN)
            raise self._error(f"failed with exit code {ran.returncode}: {said or 'it printed nothing on stderr'}")
        return ran.stdout

    def _read(self, printed: str) -> tuple[str, float]:
        """The token, and when it expires. Errors do not repeat it."""
        wanted = "a token, or an ExecCredential with status.token as kubectl's credential plugins do"
        token, expires = printed.strip(), float("inf")
        if token.startswith("{"):
            try:
                status = _ExecCredential.model_validate_json(token).status
            except ValidationError:
                raise self._error(f"printed other JSON: it must print {wanted}") from None
            token = status.token.strip()
            if status.expirationTimestamp is not None:
                expires = status.expirationTimestamp.timestamp()
        if len(token.split()) != 1:
            raise self._error(f"printed {'more than a' if token else 'no'} token: it must print {wanted}")
        return token, expires

    def _error(self, what: str) -> JobError:
        return JobError(f"the MESHGATE_TOKEN_COMMAND {self._command!r} {what}")


_token_command = cache(_TokenCommand)
