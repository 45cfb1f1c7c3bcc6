from __future__ import annotations

import dataclasses

from meshgate_sync.relay.commands import Timeouts

DEFAULTS = Timeouts()


def test_every_field_is_a_positive_number_of_seconds() -> None:
    assert all(getattr(DEFAULTS, field.name) > 0 for field in dataclasses.fields(Timeouts))


def test_heartbeats_come_well_within_the_timeouts_they_prevent() -> None:
    assert 4 * DEFAULTS.heartbeat_interval <= DEFAULTS.silence_timeout
    assert 4 * DEFAULTS.busy_heartbeat_interval <= min(DEFAULTS.stripe_silence_timeout, DEFAULTS.backup_timeout)


def test_the_backup_takes_over_before_the_connection_is_closed() -> None:
    assert DEFAULTS.backup_timeout < DEFAULTS.alert_silence_timeout < DEFAULTS.silence_timeout


def test_a_starved_parent_is_given_longer_than_a_stalled_one() -> None:
    assert DEFAULTS.stall_timeout < DEFAULTS.starved_timeout
