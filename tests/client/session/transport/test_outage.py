"""What the user sees of a time without a connection, in virtual time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

from meshgate.session.transport.outage import Outage
from tests.gateway.virtual_time import run_in_virtual_time

Shown = list[tuple[str, bool]]


def shown_during(scenario: Callable[[Outage], Coroutine[Any, Any, None]]) -> Shown:
    """What is shown, without the time of day, and whether it is final."""
    shown: Shown = []

    def show(text: str, final: bool) -> None:
        shown.append((re.sub(r", since \d\d:\d\d:\d\d", "", text), final))

    run_in_virtual_time(scenario(Outage("the gateway", 5.0, lambda: "refused", show)))
    return shown


def test_a_short_outage_is_not_shown() -> None:
    async def scenario(outage: Outage) -> None:
        outage.begin()
        await asyncio.sleep(4.9)
        assert "no connection to the gateway for 5 s" in outage.describe()
        outage.end()
        assert outage.describe() == ""
        await asyncio.sleep(10)

    assert shown_during(scenario) == []


def test_an_outage_is_updated_in_place_and_its_end_is_shown() -> None:
    async def scenario(outage: Outage) -> None:
        outage.begin()
        outage.end()  # the first connection
        outage.begin()
        await asyncio.sleep(4)
        outage.begin()  # a connection that was cut before the session was established
        await asyncio.sleep(2.5)
        outage.end()

    waiting = "no connection to the gateway for {} s: refused; calls wait, and nothing is lost"
    end = "connected to the gateway again after 6 s; nothing was lost"
    assert shown_during(scenario) == [(waiting.format(5), False), (waiting.format(6), False), (end, True)]


def test_a_first_connection_that_takes_long_is_shown() -> None:
    async def scenario(outage: Outage) -> None:
        outage.begin()
        await asyncio.sleep(5.5)
        outage.end()

    assert shown_during(scenario)[-1] == ("connected to the gateway after 6 s", True)


def test_the_line_of_a_session_that_ends_without_a_connection_is_final() -> None:
    async def scenario(outage: Outage) -> None:
        outage.begin()
        await asyncio.sleep(5.5)
        outage.close()
        await asyncio.sleep(5)

    assert [final for _, final in shown_during(scenario)] == [False, True]
