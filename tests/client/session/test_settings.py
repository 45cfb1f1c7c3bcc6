from __future__ import annotations

import pytest

from meshgate.session.settings import ClientSettings


def test_defaults_need_no_environment() -> None:
    assert ClientSettings.load({}) == ClientSettings()
    assert ClientSettings().output is True


@pytest.mark.parametrize(
    ("text", "expected"), [("off", False), ("OFF", False), ("on", True), ("0", False), ("1", True)]
)
def test_a_variable_switches_the_output(text: str, expected: bool) -> None:
    assert ClientSettings.load({"MESHGATE_OUTPUT": text}).output is expected


def test_a_variable_names_the_directory_of_log_files() -> None:
    assert ClientSettings.load({}).log_dir is None
    assert ClientSettings.load({"MESHGATE_LOG_DIR": "logs"}).log_dir == "logs"


def test_an_argument_takes_precedence_over_the_environment() -> None:
    environment = {"MESHGATE_LEASE": "10", "MESHGATE_OUTPUT": "off"}
    settings = ClientSettings.load(environment, lease=20, output=None)
    assert (settings.lease, settings.output) == (20, False)


def test_an_empty_variable_is_ignored() -> None:
    assert ClientSettings.load({"MESHGATE_LEASE": ""}).lease == ClientSettings().lease


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"MESHGATE_LEASE": "soon"}, "MESHGATE_LEASE='soon' is not a valid setting"),
        ({"MESHGATE_LEASE": "-1"}, "MESHGATE_LEASE='-1' is not a valid setting"),
        ({"MESHGATE_OUTPUT": "loud"}, "MESHGATE_OUTPUT='loud' is not a valid setting"),
    ],
)
def test_the_error_of_an_invalid_value_names_the_variable(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClientSettings.load(environment)


def test_the_error_of_an_invalid_argument_names_it() -> None:
    with pytest.raises(ValueError, match="lease=-1 is not a valid setting"):
        ClientSettings.load({"MESHGATE_LEASE": "5"}, lease=-1)
    with pytest.raises(ValueError, match="speed=5 is not a valid setting"):
        ClientSettings.load({}, speed=5)
