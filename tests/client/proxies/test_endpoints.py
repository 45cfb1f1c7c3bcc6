from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from meshgate.errors import (
    InvalidRequestError,
    SupervisionError,
    UnpicklableArgument,
)
from meshgate.proxies import Accumulator, send
from meshgate.proxies.client import Channel, Client
from meshgate.shapes.shape import Extent
from meshgate_wire import Fragments
from meshgate_wire.messages import (
    Call,
    Failed,
    Failure,
    SendTo,
    stream_of,
)
from tests.client.counting import counters
from tests.client.scripted_gateway import ScriptedGateway, ScriptedSession


def test_call_returns_a_value_mesh_of_the_meshs_shape(gateway: ScriptedGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: rank * amount
    values = counters(client).add.call(2).get(timeout=20)
    assert values.extent == Extent(["hosts", "gpus"], [2, 2])
    assert values.item(hosts=1, gpus=0) == 4
    assert repr(values).startswith("ValueMesh({hosts: 2, gpus: 2})")


def test_a_slice_calls_exactly_its_ranks(gateway: ScriptedGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: (rank, amount)
    mesh = counters(client)
    assert mesh.slice(gpus=1).add.call(5).get(timeout=20).values() == [(1, 5), (3, 5)]
    assert mesh.slice(hosts=1, gpus=0).add.call_one(6).get(timeout=20) == (2, 6)
    assert mesh.flatten("all").slice(all=slice(1, 3)).add.call(0).get(timeout=20).values() == [(1, 0), (2, 0)]


def test_keyword_arguments_are_sent(gateway: ScriptedGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount, *, twice: (amount, twice)
    assert counters(client).slice(hosts=0, gpus=0).add.call_one(amount=3, twice=True).get(timeout=20) == (3, True)


@pytest.mark.parametrize("wrap", [lambda endpoint: endpoint, lambda endpoint: {"inside": [endpoint]}])
def test_an_endpoint_as_an_argument_raises_and_nothing_is_sent(
    gateway: ScriptedGateway, client: Client, wrap: Callable[[Any], Any]
) -> None:
    mesh = counters(client)
    with pytest.raises(TypeError, match="cannot be pickled, as in Monarch: pass the actor mesh") as caught:
        mesh.add.call(wrap(mesh.add))
    assert isinstance(caught.value, UnpicklableArgument)
    with pytest.raises(TypeError, match="pass the actor mesh"):
        mesh.add.broadcast(amount=wrap(mesh.add))
    assert gateway.got(Call) == []


def test_choose_calls_one_actor(gateway: ScriptedGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: rank
    assert counters(client).add.choose(1).get(timeout=20) == 0
    assert gateway.got(Call)[-1].adverb == "choose"


def test_stream_yields_a_future_for_each_rank(gateway: ScriptedGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: rank + amount
    assert [future.get(timeout=20) for future in counters(client).add.stream(1)] == [1, 2, 3, 4]


def test_stream_fails_each_future_on_its_own(gateway: ScriptedGateway, client: Client) -> None:
    def fail(session: ScriptedSession, header: Call, buffers: Sequence[Fragments]) -> None:
        failure = Failure(kind="supervision", message="it died", ranks=(2,))
        session.send(Failed(call=header.call, rank=2, failure=failure), stream=stream_of(header.target.object))
        session.send(Failed(call=header.call, failure=failure), stream=stream_of(header.target.object))

    gateway.on[Call] = fail
    errors = [future.exception(timeout=20) for future in counters(client).add.stream(1)]
    assert [type(error) for error in errors] == [SupervisionError] * 4


def test_broadcast_returns_without_waiting(gateway: ScriptedGateway, client: Client) -> None:
    mesh = counters(client)
    assert mesh.add.broadcast(1) is None
    mesh.initialized.get(timeout=20)
    assert gateway.got(Call)[-1].adverb == "broadcast"


def test_results_can_be_awaited_on_any_loop(gateway: ScriptedGateway, client: Client) -> None:
    one = counters(client).slice(hosts=0, gpus=0)

    async def main() -> list[int]:
        return list(await asyncio.gather(*(one.add.call_one(i) for i in range(50))))

    assert asyncio.run(main()) == asyncio.run(main()) == list(range(50))


@pytest.mark.parametrize("adverb", ["call", "choose", "stream", "broadcast"])
def test_invalid_arguments_raise_at_the_call(mesh: Any, adverb: str) -> None:
    with pytest.raises(TypeError, match=r"\.add\(\): missing a required argument: 'amount'"):
        getattr(mesh.add, adverb)()
    with pytest.raises(TypeError, match="unexpected keyword argument 'thrice'"):
        getattr(mesh.add, adverb)(1, thrice=True)


def test_an_endpoint_that_is_called_like_a_function_says_how_to_call_it(gateway: ScriptedGateway, mesh: Any) -> None:
    with pytest.raises(TypeError) as caught:
        mesh.add(3, twice=True)
    assert str(caught.value).startswith(
        "counters.add runs in the actors' processes: use .call(3, twice=True) (every rank), .call_one(3, twice=True) (a"
    )
    with pytest.raises(TypeError, match=r"use \.call\(\.\.\.\) \(every rank\)"):
        mesh.echo(*["x" * 30] * 4)
    assert gateway.got(Call) == []


def test_call_one_needs_exactly_one_actor(mesh: Any) -> None:
    with pytest.raises(
        ValueError, match=r"requires exactly 1 actor, but mesh has 4: select one with slice\(hosts=0, g"
    ):
        mesh.add.call_one(1)


def test_rref_is_rejected_with_an_alternative(mesh: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"use keep\(\), or submit the program"):
        mesh.add.rref(1)


def test_a_ported_endpoint_is_called_without_its_port(gateway: ScriptedGateway, mesh: Any) -> None:
    gateway.functions["ported"] = lambda rank, value: value
    assert mesh.ported.call("x").get(timeout=20).values() == ["x"] * 4
    assert gateway.got(Call)[0].explicit_port is True
    with pytest.raises(TypeError, match=r"values for argument 'port'\. The parameters: value$"):
        mesh.ported.call(1, port=1)
    with pytest.raises(TypeError, match="too many positional arguments"):
        mesh.ported.call("port", "x")


def test_an_unpicklable_argument_is_named_and_nothing_is_sent(gateway: ScriptedGateway, mesh: Any) -> None:
    mesh.initialized.get(timeout=20)
    with pytest.raises(UnpicklableArgument, match="argument 'value'") as caught:
        mesh.echo.call({"lock": [__import__("threading").Lock()]})
    assert "['lock'][0]" in str(caught.value)
    assert gateway.got(Call) == []


def test_send_directs_replies_to_a_port(gateway: ScriptedGateway, mesh: Any) -> None:
    port, _ = Channel.open()
    send(mesh.slice(hosts=1).add, (1,), {"twice": True}, port, selection="choose")
    mesh.initialized.get(timeout=20)
    (header,) = gateway.got(SendTo)
    assert header.port == port._remote.number
    assert header.selection == "choose"
    assert header.target.region is not None


def test_send_without_a_port_drops_the_replies(gateway: ScriptedGateway, mesh: Any) -> None:
    send(mesh.add, (1,), {})
    send(mesh.add, (1,), {}, selection="choose")
    mesh.initialized.get(timeout=20)
    assert [header.adverb for header in gateway.got(Call)] == ["broadcast", "choose"]


def test_send_validates_its_arguments(mesh: Any) -> None:
    with pytest.raises(TypeError, match="needs an endpoint"):
        send(5, (), {})
    with pytest.raises(ValueError, match="expected 'all' or 'choose'"):
        send(mesh.add, (1,), {}, selection="some")  # type: ignore[arg-type]


def test_an_accumulator_folds_all_replies(gateway: ScriptedGateway, mesh: Any) -> None:
    gateway.functions["add"] = lambda rank, amount: rank * amount
    assert Accumulator(mesh.add, 1000, lambda total, value: total + value).accumulate(10).get(timeout=20) == 1060


def test_an_accumulator_without_replies_returns_the_identity() -> None:
    class Silent:
        def stream(self) -> list[Any]:
            return []

    assert Accumulator(Silent(), 42, max).accumulate().get() == 42  # type: ignore[arg-type]
