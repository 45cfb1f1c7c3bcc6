"""Where the driver's token for a gateway comes from, and what a command that prints it may do."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshgate.errors import AuthenticationError, ConnectionFailedError, JobError
from meshgate.jobs import tokens
from meshgate.jobs.kubernetes.remote_gateway import RemoteGateway
from meshgate.jobs.tokens import find_token
from meshgate.session.gateway_client import request_json
from tests.gateway.server_process import TOKEN, ServerProcess


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for kind in ("", "_FILE", "_COMMAND"):
        monkeypatch.delenv(f"MESHGATE_TOKEN{kind}", raising=False)
    monkeypatch.setattr(tokens, "SERVICE_ACCOUNT_TOKEN", tmp_path / "of-the-pod")


Prints = Callable[..., Path]


@pytest.fixture
def prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Prints:
    """Makes ``MESHGATE_TOKEN_COMMAND`` print a text. Returns the file that has a line for each of its runs."""
    runs = tmp_path / "runs"
    command = tmp_path / "my command"

    def prints(text: str, *, then: str = "") -> Path:
        (tmp_path / "printed").write_text(text)
        command.write_text(f"#!/bin/sh\necho >> '{runs}'\ncat '{tmp_path}/printed'\n{then}\n")
        command.chmod(0o755)
        monkeypatch.setenv("MESHGATE_TOKEN_COMMAND", f"{shlex.quote(str(command))} --for me")
        return runs

    return prints


def credential(token: str, expires: str) -> str:
    status = {"token": token, "expirationTimestamp": expires}
    return json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status})


def count(runs: Path) -> int:
    return len(runs.read_text().splitlines())


def test_the_token_comes_from_the_environment_or_the_pod(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prints: Prints
) -> None:
    with pytest.raises(JobError, match="no token: set MESHGATE_TOKEN, MESHGATE_TOKEN_FILE or MESHGATE_TOKEN_COMMAND"):
        find_token()
    (tmp_path / "of-the-pod").write_text("of the pod\n")
    assert find_token() == "of the pod"
    prints("of-the-command\n")
    assert find_token() == "of-the-command"
    (tmp_path / "token").write_text("\n")
    monkeypatch.setenv("MESHGATE_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(JobError, match=r"the file of MESHGATE_TOKEN_FILE=\S+ is empty"):
        find_token()
    (tmp_path / "token").write_text("of the file\n")
    assert find_token() == "of the file"
    monkeypatch.setenv("MESHGATE_TOKEN", " secret\n")
    assert find_token() == "secret"


def test_a_token_without_a_known_end_is_used_again_for_a_while(monkeypatch: pytest.MonkeyPatch, prints: Prints) -> None:
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    runs = prints("first")
    assert find_token() == "first"
    prints("second")
    now += tokens.REUSED_FOR - 1
    assert find_token() == "first"
    now += 1
    assert find_token() == "second"
    assert count(runs) == 2
    now -= 3600  # the clock was an hour fast
    assert find_token() == "second"
    assert count(runs) == 3


def test_a_file_that_cannot_be_read_as_text_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    monkeypatch.setenv("MESHGATE_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(JobError, match=f"MESHGATE_TOKEN_FILE={tmp_path}/token: .* can't decode"):
        find_token()


def test_a_credential_that_expires_sooner_is_used_until_then(monkeypatch: pytest.MonkeyPatch, prints: Prints) -> None:
    now = 1767225600.0  # 2026-01-01
    monkeypatch.setattr("time.time", lambda: now)
    runs = prints(credential("first", "2026-01-01T00:00:10Z"))
    assert find_token() == "first"
    prints(credential("second", "2026-01-01T09:00:00Z"))
    now += 9
    assert find_token() == "first"
    now += 1
    assert find_token() == "second"
    now += tokens.REUSED_FOR - 1
    assert find_token() == "second"
    assert count(runs) == 2


def test_connections_that_need_the_token_at_once_share_one_run(prints: Prints) -> None:
    runs = prints("shared")
    with ThreadPoolExecutor(8) as threads:
        assert {each.result() for each in [threads.submit(find_token) for _ in range(8)]} == {"shared"}
    assert count(runs) == 1


@pytest.mark.parametrize(
    ("text", "then", "reason"),
    [
        ("secret", "echo 'the login has ended' >&2; exit 3", "failed with exit code 3: the login has ended$"),
        ("", "seq 10001 10400 >&2; exit 3", "failed with exit code 3: 10235\n10236\n"),
        ("", "exit 4", "failed with exit code 4: it printed nothing on stderr"),
        ("\n", "", "printed no token: it must print a token, or an ExecCredential"),
        ("a secret", "", "printed more than a token"),
        ('{"secret": "x"}', "", "printed other JSON"),
        (credential("secret", "some day"), "", "printed other JSON"),
        (credential("", "2026-01-01T00:00:00Z"), "", "printed no token"),
    ],
)
def test_a_failure_names_the_command_and_what_it_said(text: str, then: str, reason: str, prints: Prints) -> None:
    prints(text, then=then)
    with pytest.raises(JobError, match=rf"the MESHGATE_TOKEN_COMMAND .*/my command' --for me.* {reason}") as caught:
        find_token()
    assert "secret" not in str(caught.value)
    prints("a-token")
    assert find_token() == "a-token"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("/no/such/command", "cannot be run: .*No such file or directory"),
        ("'an open quote", "cannot be run: No closing quotation"),
        ("sleep 1000", "did not end within 0.1 s"),
    ],
)
def test_a_command_that_does_not_run_or_does_not_end(
    command: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHGATE_TOKEN_COMMAND", command)
    monkeypatch.setattr(tokens, "COMMAND_TIMEOUT", 0.1)
    with pytest.raises(JobError, match=f"the MESHGATE_TOKEN_COMMAND .* {reason}"):
        find_token()


def test_a_gateway_gets_the_token_that_the_command_prints_now(monkeypatch: pytest.MonkeyPatch, prints: Prints) -> None:
    monkeypatch.setattr(tokens, "REUSED_FOR", 0.0)
    prints(TOKEN)
    with ServerProcess() as gateway:
        remote = RemoteGateway(gateway.url, None)
        assert remote._get("/v1/job")["meshes"] is not None
        prints("x" * 32)
        for ask in (lambda: remote._get("/v1/job"), lambda: request_json(remote._dialer, "/v1/job")):
            with pytest.raises(AuthenticationError):
                ask()
        prints("", then="echo 'log in again' >&2; exit 1")
        with pytest.raises(ConnectionFailedError, match=r"MESHGATE_TOKEN_COMMAND .*log in again"):
            request_json(remote._dialer, "/v1/job")
        prints(TOKEN)
        assert request_json(remote._dialer, "/v1/job") == remote._get("/v1/job")
        assert asyncio.run(remote._dialer.dial()).renews_token
