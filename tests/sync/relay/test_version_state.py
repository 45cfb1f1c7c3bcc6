from __future__ import annotations

import itertools

import pytest

from meshgate_sync.relay.frames import Offer
from meshgate_sync.relay.version_state import TRANSITIONS, InvalidTransition, Version, VersionEvent, VersionState
from meshgate_sync.tree.digest import NOTHING

ROOT = bytes.fromhex("3f9c0a41d2e7") + bytes(26)
ALL = list(itertools.product(VersionState, VersionEvent))


def version(state: VersionState) -> Version:
    return Version(Offer(ROOT, NOTHING, NOTHING, False, b""), 1, state)


@pytest.mark.parametrize(("state", "event"), [pair for pair in ALL if pair[1] in TRANSITIONS[pair[0]]])
def test_an_event_in_the_table_changes_the_state(state: VersionState, event: VersionEvent) -> None:
    changed = version(state)
    changed.apply(event)
    assert changed.state is TRANSITIONS[state][event]


@pytest.mark.parametrize(("state", "event"), [pair for pair in ALL if pair[1] not in TRANSITIONS[pair[0]]])
def test_any_other_event_raises_and_changes_nothing(state: VersionState, event: VersionEvent) -> None:
    unchanged = version(state)
    with pytest.raises(
        InvalidTransition, match=f"version 3f9c0a41d2e7 is {state.value}: event '{event.value}'"
    ) as error:
        unchanged.apply(event)
    assert (error.value.state, error.value.event) == (state, event)
    assert unchanged.state is state


def test_the_table_has_every_state_and_uses_every_event() -> None:
    assert TRANSITIONS.keys() == set(VersionState)
    assert {event for events in TRANSITIONS.values() for event in events} == set(VersionEvent)


def test_every_state_leads_to_ready_and_none_but_failure_is_reached_from_all() -> None:
    reaching = {VersionState.READY}
    while more := {state for state in TRANSITIONS if reaching & set(TRANSITIONS[state].values())} - reaching:
        reaching |= more
    assert reaching == set(VersionState)
    always = set.intersection(*(set(events.values()) for events in TRANSITIONS.values()))
    assert always == {VersionState.FAILED}


def test_missing_pieces_are_known_only_while_they_are_fetched() -> None:
    fetching = version(VersionState.FETCHING)
    with pytest.raises(AssertionError):
        fetching.validate_state()
    fetching.missing = {ROOT: 4}
    fetching.validate_state()
    fetching.state = VersionState.READY
    with pytest.raises(AssertionError):
        fetching.validate_state()
