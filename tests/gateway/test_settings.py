from __future__ import annotations

from pathlib import Path

import pytest

from meshgate_gateway.settings import LocalMesh, Settings, StaticMesh, load_settings

TOKEN = "0123456789abcdef0"


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_TOKEN", TOKEN)


def errors(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The error lines for these arguments, without the last, which names --help."""
    with pytest.raises(SystemExit) as error:
        load_settings(arguments)
    assert error.value.code == 2
    *lines, last = capsys.readouterr().err.splitlines()
    assert "--help" in last
    return lines


def test_only_the_token_is_required() -> None:
    settings = load_settings([])
    assert (settings.host, settings.port, settings.lease, settings.first_session) == ("127.0.0.1", 0, 14400, 60)
    assert settings.read_token().get_secret_value() == TOKEN


def test_flags_and_environment_variables_are_equivalent(monkeypatch: pytest.MonkeyPatch) -> None:
    by_flag = load_settings(["--local-mesh", "workers=2", "--idle-timeout", "3", "--log-format", "json"])
    monkeypatch.setenv("MESHGATE_LOCAL_MESH", "workers=2")
    monkeypatch.setenv("MESHGATE_IDLE_TIMEOUT", "3")
    monkeypatch.setenv("MESHGATE_LOG_FORMAT", "json")
    assert load_settings([]) == by_flag


def test_a_flag_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_PORT", "1")
    assert load_settings(["--port", "2"]).port == 2


def test_meshes_may_be_given_in_one_flag_or_several() -> None:
    expected = (
        StaticMesh(name="workers", addresses=("tcp://a:1", "tcp://b:1@tcp://0.0.0.0:1")),
        StaticMesh(name="gpus", addresses=("ipc:///tmp/x=y",)),
    )
    together = "workers=tcp://a:1,tcp://b:1@tcp://0.0.0.0:1,gpus=ipc:///tmp/x=y"
    assert load_settings(["--mesh", together]).mesh == expected
    apart = ["--mesh", "workers=tcp://a:1,tcp://b:1@tcp://0.0.0.0:1", "--mesh", "gpus=ipc:///tmp/x=y"]
    assert load_settings(apart).mesh == expected
    local = load_settings(["--local-mesh", "a=1,b=2", "--local-mesh", "c=3"]).local_mesh
    assert local == tuple(LocalMesh(name=name, count=count) for name, count in (("a", 1), ("b", 2), ("c", 3)))


@pytest.mark.parametrize(("given", "address"), [("10.0.0.1:8650", ("10.0.0.1", 8650)), ("[::1]:80", ("::1", 80))])
def test_a_gateway_forwards_to_an_address(given: str, address: tuple[str, int]) -> None:
    assert load_settings(["--forward-to", given]).forwarding_address() == address


def test_help_describes_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        load_settings(["--help"])
    assert exited.value.code == 0
    text = capsys.readouterr().out
    for name, field in Settings.model_fields.items():
        if name != "token":
            assert f"--{name.replace('_', '-')}" in text
            assert field.description
    assert "MESHGATE_TOKEN" in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--port", "99999"], "--port: input should be less than or equal to 65535"),
        (["--lease", "0"], "--lease: input should be greater than 0"),
        (["--lease", "inf"], "--lease: input should be a finite number"),
        (["--log-level", "loud"], "--log-level: input should be 'debug', 'info', 'warning' or 'error'"),
        (["--local-mesh", "workers"], "--local-mesh: 'workers' is not of the form NAME=COUNT"),
        (
            ["--local-mesh", "workers=0"],
            "--local-mesh: the number of hosts of mesh workers must be 1 to 1024, as in workers=2",
        ),
        (["--local-mesh", "workers=2,workers=3"], "--local-mesh: mesh workers is given twice"),
        (["--mesh", "workers=host"], "--mesh: an address of mesh workers has no scheme"),
        (["--mesh", "a=ipc://x", "--local-mesh", "a=1"], "mesh a is given by both --mesh and --local-mesh: rename one"),
        (["--forward-to", "host"], "--forward-to 'host' is neither HOST:PORT nor job"),
        (["--forward-to", "[::1:8"], "--forward-to '[::1:8' is neither HOST:PORT nor job"),
        (["--forward-to", "job"], "--forward-to job needs --kubernetes-job"),
        (["--forward-to", "a:1", "--local-mesh", "a=1"], "--forward-to cannot be combined with --local-mesh"),
        (["--token", "x" * 20], "--token: every user of this machine could read it: set MESHGATE_TOKEN"),
    ],
)
def test_an_invalid_setting_is_one_readable_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    lines = errors(capsys, *arguments)
    assert len(lines) == 1
    assert lines[0].startswith(f"meshgate_gateway: {line}")


def test_all_invalid_settings_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(errors(capsys, "--port", "x", "--lease", "y", "--mesh", "z")) == 3


def test_an_unknown_flag_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        load_settings(["--prot", "1"])
    assert error.value.code == 2
    assert "--prot" in capsys.readouterr().err


@pytest.mark.parametrize("token", ["short", "has a space in it, and more", "ümlaute-sind-kein-ascii"])
def test_an_invalid_token_is_an_error_that_does_not_show_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("MESHGATE_TOKEN", token)
    lines = errors(capsys)
    assert "at least 16 printable ASCII characters" in lines[0]
    assert token not in "".join(lines)


def test_a_missing_token_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHGATE_TOKEN")
    assert errors(capsys) == ["meshgate_gateway: no token: set MESHGATE_TOKEN or --token-file"]


def test_the_token_may_come_from_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MESHGATE_TOKEN")
    file = tmp_path / "token"
    file.write_text("from-a-file-with-a-newline\n")
    assert load_settings(["--token-file", str(file)]).read_token().get_secret_value() == "from-a-file-with-a-newline"
    assert "cannot be read" in errors(capsys, "--token-file", str(tmp_path / "absent"))[0]


def test_giving_the_token_twice_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "given twice" in errors(capsys, "--token-file", str(tmp_path))[0]


def test_the_repr_of_the_settings_excludes_the_token() -> None:
    assert TOKEN not in repr(load_settings([])) + str(load_settings([]))


def test_a_service_variable_injected_by_kubernetes_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHGATE_PORT", "tcp://10.0.0.1:80")
    assert "enableServiceLinks: false" in errors(capsys)[0]
