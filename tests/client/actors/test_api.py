"""Actors are written with Monarch's own names if torchmonarch is installed, else with the stand-ins."""

from __future__ import annotations

import json

import monarch.actor
import pytest

from meshgate import errors
from meshgate.actors import api
from tests.client.laptop import run_without


def test_monarchs_names_are_used_if_it_is_installed() -> None:
    for name in ("Actor", "endpoint", "concurrent_endpoint", "current_rank", "current_size", "context", "this_host"):
        assert getattr(api, name) is getattr(monarch.actor, name)
    assert isinstance(api.endpoint(lambda self: None), api.EndpointProperty)


def test_a_handler_for_monarchs_actor_error_catches_ours() -> None:
    assert errors.ActorError.__bases__ == (errors.MeshgateError, monarch.actor.ActorError)
    with pytest.raises(monarch.actor.ActorError, match="wrong batch"):
        raise errors.ActorError(ValueError("wrong batch"))


def test_errors_are_importable_without_importing_monarch() -> None:
    code = "import meshgate.errors; print([name for name in sys.modules if name.startswith(('meshgate.', 'monarch'))])"
    assert (
        run_without(code=code).decode().strip() == "['meshgate.caller', 'meshgate.monarch_classes', 'meshgate.errors']"
    )


def test_as_endpoint_accepts_methods_of_actor_meshes_only() -> None:
    class NotAnEndpoint:
        def __as_endpoint__(self, explicit_response_port: bool) -> str:
            return f"converted, port: {explicit_response_port}"

    assert api.as_endpoint(NotAnEndpoint(), explicit_response_port=True) == "converted, port: True"
    with pytest.raises(ValueError, match="expected an method of a spawned actor"):
        api.as_endpoint(print)


def test_stand_ins_are_used_if_monarch_is_missing() -> None:
    output = run_without(
        "monarch",
        code="""
        import json
        from meshgate.actors import actor_class, api

        class T(api.Actor):
            @api.endpoint
            def f(self, x: int) -> int: return x

        def text(call):
            try: call()
            except Exception as error: return type(error).__name__ + ": " + str(error)

        read = actor_class.endpoints_of(T)
        print(json.dumps({
            "module": api.Actor.__module__,
            "endpoints": list(read.endpoints),
            "check": text(lambda: read.endpoints["f"].check((), {})),
            "as_endpoint": text(lambda: api.as_endpoint(print)),
            "outside": {name: text(getattr(api, name)) for name in (
                "context", "current_rank", "current_size", "current_actor_name", "this_host", "this_proc")},
        }))
        """,
    )
    facts = json.loads(output)
    assert (facts["module"], facts["endpoints"]) == ("meshgate.actors.standins", ["f"])
    assert facts["check"] == "TypeError: missing a required argument: 'x'"
    assert facts["as_endpoint"] == "ValueError: expected an method of a spawned actor"
    for name, text in facts["outside"].items():
        assert text.startswith(f"RuntimeError: {name}() works inside an actor, on a worker.")
