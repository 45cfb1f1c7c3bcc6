"""Monarch's settings of this process, with Monarch's own ``config`` and without a running Monarch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from meshgate_gateway.engine.monarch.settings import FrameTooLarge, MonarchSettings
from tests.gateway.engine.fakes import turns


@pytest.fixture
def settings() -> Iterator[MonarchSettings]:
    made = MonarchSettings()
    yield made
    asyncio.run(made.configure({}))


def now(name: str) -> Any:
    from monarch.config import get_global_config

    return get_global_config()[name]


async def test_settings_apply_until_a_later_call_leaves_them_out(settings: MonarchSettings) -> None:
    initial = await settings.configure({})
    changed = await settings.configure({"stop_actor_timeout": "33s", "max_cast_fanout": 5})
    assert (changed["stop_actor_timeout"], changed["max_cast_fanout"]) == ("33s", 5)
    assert await settings.configure({"max_cast_fanout": 6}) == {**initial, "max_cast_fanout": 6}
    assert await settings.configure({}) == initial
    assert all(isinstance(value, (bool, int, float, str, type(None))) for value in initial.values())


@pytest.mark.parametrize(
    ("wrong", "error"),
    [({"max_cast_fanout": 5, "nonsense": 1}, "no setting nonsense"), ({"stop_actor_timeout": 5}, "invalid value `5`")],
)
async def test_a_setting_that_monarch_rejects_changes_nothing(
    settings: MonarchSettings, wrong: dict[str, object], error: str
) -> None:
    before = await settings.configure({"stop_actor_timeout": "33s", "max_cast_fanout": 7})
    with pytest.raises((ValueError, TypeError), match=error):
        await settings.configure(wrong)
    assert await settings.configure({"stop_actor_timeout": "33s", "max_cast_fanout": 7}) == before


@pytest.mark.parametrize("failing", [False, True])
async def test_hosts_do_not_get_a_delivery_timeout_or_a_frame_limit(settings: MonarchSettings, failing: bool) -> None:
    own = now("message_delivery_timeout"), now("codec_max_frame_length")
    await settings.configure({"message_delivery_timeout": "7s", "codec_max_frame_length": 5000, "max_cast_fanout": 7})
    attached = asyncio.get_running_loop().create_future()
    settings.withhold()
    settings.attaching(attached)
    assert (now("message_delivery_timeout"), now("codec_max_frame_length")) == own
    assert now("max_cast_fanout") == 7
    applied = asyncio.ensure_future(settings.wait_applied())
    changed = asyncio.ensure_future(settings.configure({"message_delivery_timeout": "8s"}))
    await turns()
    assert not applied.done()
    assert not changed.done()
    assert now("message_delivery_timeout") == own[0]
    if failing:
        attached.set_exception(RuntimeError("no worker answers"))
    else:
        attached.set_result(None)
    await asyncio.gather(applied, changed)
    assert (now("message_delivery_timeout"), now("codec_max_frame_length")) == ("8s", own[1])


def test_a_frame_limit_holds_for_what_this_process_sends(settings: MonarchSettings) -> None:
    settings.check_frame(2**40)
    asyncio.run(settings.configure({"codec_max_frame_length": 5000}))
    settings.check_frame(5000)
    with pytest.raises(FrameTooLarge, match=r"rejecting oversize frame: len=5001 > max=5000.*CODEC_MAX_FRAME_LENGTH"):
        settings.check_frame(5001)
