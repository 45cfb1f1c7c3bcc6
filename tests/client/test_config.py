from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

import meshgate
from meshgate.errors import InvalidRequestError
from meshgate.proxies.client import Client
from meshgate.session.dialing import UrlDialer
from meshgate_wire.messages import ConfigureMonarch, Failed, Failure, Values
from tests.client.scripted_gateway import TOKEN, ScriptedGateway


@pytest.fixture(autouse=True)
def _own_settings_are_reset() -> Iterator[None]:
    yield
    meshgate.config.clear_runtime_config()


@pytest.fixture
def configurable(gateway: ScriptedGateway) -> ScriptedGateway:
    def configure(session: Any, header: ConfigureMonarch, _: Any) -> None:
        if "nonsense" in header.settings:
            failure = Failure(kind="invalid", message="Monarch has no setting nonsense")
            session.send(Failed(call=header.call, failure=failure))
        else:
            session.send(Values(call=header.call), pickle.dumps({"max_cast_fanout": 16, **header.settings}))

    gateway.on[ConfigureMonarch] = configure
    return gateway


def configured(gateway: ScriptedGateway) -> list[dict[str, object]]:
    return [header.settings for header in gateway.got(ConfigureMonarch)]


def test_a_new_session_gets_the_settings_that_the_program_has_changed(configurable: ScriptedGateway) -> None:
    meshgate.config.configure(stop_actor_timeout="1m")
    with Client.connect(UrlDialer(configurable.url, TOKEN)):
        assert meshgate.config.get_global_config() == {"max_cast_fanout": 16, "stop_actor_timeout": "1m"}
    assert configured(configurable)[0] == {"stop_actor_timeout": "1m"}


def test_without_a_session_the_settings_are_those_of_this_machines_monarch() -> None:
    import monarch.config

    with meshgate.config.configured(max_cast_fanout=4) as settings:
        local = monarch.config.get_global_config()
        assert settings.keys() == local.keys()
        assert (settings["max_cast_fanout"], settings["rdma_qps_per_cq"]) == (4, local["rdma_qps_per_cq"])


def test_without_a_session_this_machines_monarch_checks_values_and_words_them() -> None:
    with meshgate.config.configured(stop_actor_timeout="90s") as settings:
        assert settings["stop_actor_timeout"] == "1m 30s"
    for wrong, also in ((30, TypeError), ("soon", ValueError)):
        with pytest.raises(InvalidRequestError, match="invalid value") as raised:
            meshgate.config.configure(stop_actor_timeout=wrong)
        assert isinstance(raised.value, also)
    for unknown, help_text in (
        ("stop_actor_timout", "Did you mean 'stop_actor_timeout'?"),
        ("of_a_newer_release", "A setting of the gateway's release alone can be changed after state()"),
    ):
        with pytest.raises(InvalidRequestError) as raised:
            meshgate.config.configure(**{unknown: 1})
        assert str(raised.value) == f"this machine's Monarch has no setting {unknown!r}. {help_text}"
    assert meshgate.config.get_runtime_config() == {}


def test_an_open_session_gets_all_changes(configurable: ScriptedGateway, client: Client) -> None:
    with meshgate.config.configured(max_cast_fanout=4) as settings:
        meshgate.config.configure(use_direct_spawn=True)
        assert meshgate.config.get_runtime_config() == {"max_cast_fanout": 4, "use_direct_spawn": True}
    assert settings == {"max_cast_fanout": 4}
    both = {"max_cast_fanout": 4, "use_direct_spawn": True}
    assert configured(configurable) == [{"max_cast_fanout": 4}, {"max_cast_fanout": 4}, both, {}]


def test_a_setting_that_cannot_be_applied_is_refused_and_changes_nothing(
    configurable: ScriptedGateway, client: Client
) -> None:
    with pytest.raises(InvalidRequestError, match="no setting nonsense"):
        meshgate.config.configure(nonsense=1)
    with pytest.raises(InvalidRequestError, match="default_transport: the job chooses"):
        meshgate.config.configure(default_transport="tcp")
    with pytest.raises(
        InvalidRequestError, match=r"^monarch\.config was not sent: settings\.xx*\.\[key\]: String should have"
    ):
        meshgate.config.configure(**{"x" * 300: 1})
    assert meshgate.config.get_runtime_config() == {}
    assert configured(configurable) == [{"nonsense": 1}]


def test_changes_through_monarch_reach_the_session(configurable: ScriptedGateway, client: Client) -> None:
    import monarch.actor
    import monarch.config

    with monarch.config.configured(max_cast_fanout=4):
        assert configured(configurable) == [{"max_cast_fanout": 4}]
    assert configured(configurable)[-1] == {}
    with pytest.raises(InvalidRequestError, match="file_log_level: Monarch reads"):
        monarch.config.configure(file_log_level="info")
    with pytest.raises(InvalidRequestError, match=r"no enable_transport\(\) is needed"):
        monarch.actor.enable_transport("tcp")


def test_a_missing_name_gives_the_reason() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'parametrize_config', unlike Monarch: use pytest"):
        meshgate.config.parametrize_config  # noqa: B018
