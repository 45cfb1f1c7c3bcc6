from __future__ import annotations

from typing import Any, ClassVar

import pytest

from meshgate.actors.monarch_settings import REFUSED, SettingsFollower, check_settings
from meshgate.errors import InvalidRequestError


def test_settings_that_a_session_cannot_apply_are_all_named_with_the_reason() -> None:
    with pytest.raises(InvalidRequestError) as raised:
        check_settings({"force_file_log": 3, "default_transport": "tcp", "stop_actor_timeout": "1s", "other": object()})
    for name in ("force_file_log", "default_transport"):
        assert f"{name}: {REFUSED[name]}" in str(raised.value)
    assert "other: <object" in str(raised.value)
    assert "stop_actor_timeout" not in str(raised.value)


def test_forwarding_of_output_may_be_on_but_not_off() -> None:
    assert check_settings({"enable_log_forwarding": True, "max_cast_fanout": 4}) == {"max_cast_fanout": 4}
    with pytest.raises(InvalidRequestError, match="enable_log_forwarding: meshgate always forwards"):
        check_settings({"enable_log_forwarding": False})


class Config:
    """As ``monarch.config``, with three settings."""

    initial: ClassVar[dict[str, object]] = {
        "max_cast_fanout": 16,
        "stop_actor_timeout": "10s",
        "default_transport": "unix",
    }

    def __init__(self, **settings: object) -> None:
        self.settings = {**self.initial, **settings}

    def configure(self, **settings: object) -> None:
        self._configure(**settings)

    def clear(self) -> None:
        self._clear_runtime_config()

    def _configure(self, **settings: object) -> None:
        self.settings.update(settings)

    def _clear_runtime_config(self) -> None:
        self.settings = dict(self.initial)

    def get_global_config(self) -> dict[str, object]:
        return dict(self.settings)


class Sessions:
    """Follows ``config`` for a session while ``open``."""

    def __init__(self, config: Config) -> None:
        self.config, self.open, self.error = config, True, ""
        self.applied: list[dict[str, object]] = []
        self.follower = SettingsFollower(config, self.changed, lambda: self.open)

    def changed(self) -> None:
        if self.error:
            raise InvalidRequestError(self.error)
        self.applied.append(self.follower.differences())


def test_changes_through_monarch_are_passed_on_also_those_from_before() -> None:
    sessions = Sessions(Config(max_cast_fanout=4))
    assert sessions.follower.differences() == {"max_cast_fanout": 4}
    before = sessions.config.get_global_config()
    sessions.config.configure(stop_actor_timeout="1s")
    sessions.config.clear()
    sessions.config.configure(**before)  # as configured() does
    assert sessions.applied == [{"max_cast_fanout": 4, "stop_actor_timeout": "1s"}, {}, {"max_cast_fanout": 4}]


def test_a_refused_change_is_not_made() -> None:
    sessions = Sessions(Config())
    with pytest.raises(InvalidRequestError, match="default_transport"):
        sessions.config.configure(default_transport="tcp", max_cast_fanout=4)
    sessions.error = "no setting max_cast_fanout"
    with pytest.raises(InvalidRequestError, match="no setting"):
        sessions.config.configure(max_cast_fanout=4)
    assert sessions.config.get_global_config() == Config.initial


def test_without_a_session_monarch_is_configured_alone() -> None:
    sessions = Sessions(Config())
    sessions.open = False
    sessions.config.configure(default_transport="tcp")
    assert (sessions.applied, sessions.config.settings["default_transport"]) == ([], "tcp")


def test_settings_of_the_installed_monarch_are_what_is_refused() -> None:
    import monarch.config

    settings: Any = monarch.config.get_global_config()
    of_other_releases = {name for name in REFUSED if name.startswith("remote_alloc_")}
    of_other_releases |= {"perfetto_trace_mode", "scuba_log_enter_exit"}
    assert REFUSED.keys() - of_other_releases <= settings.keys()
