"""What ranks printed comes before their results, although a network brings it later."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

import meshgate as kt
from meshgate import ActorError
from meshgate.session.output import printer
from tests.end_to_end.speakers import AsyncSpeaker, ConcurrentSpeaker, Speaker
from tests.gateway.server_process import TOKEN, ServerProcess
from tests.waiting import Printed

DELAY = 0.2  # seconds; a reply takes a few milliseconds
COUNT = 4  # calls of each kind
IN_FLIGHT = 60  # calls that may leave the engine together


@pytest.fixture(autouse=True)
def _results_wait_for_printing_however_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printer, "PRINT_TIMEOUT", 30)


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    program = ("-m", "tests.end_to_end.delayed_output", "gateway")
    delay = {"OUTPUT_DELAY": str(DELAY)}
    server = ServerProcess("--local-mesh", "workers=2", program=program, environment=delay)
    with server, kt.Client(kt.UrlDialer(server.url, TOKEN)) as client:
        yield client.attach_hosts("workers", 2).spawn_procs(per_host={"gpus": 2})


@pytest.fixture(scope="module")
def speakers(procs: Any) -> Any:
    return procs.spawn("speakers", Speaker)


@pytest.mark.parametrize(
    "name", ["say", "send", "warn", "say_in_a_child", "say_in_a_fork", "say_at_length", "say_although_redirected"]
)
def test_what_was_printed_is_shown_before_the_result(speakers: Any, name: str, printed: Printed) -> None:
    for number in range(COUNT):
        getattr(speakers, name).call(f"{name} {number}.").get()
        assert ranks_shown(f"{name} {number}.", printed) == 4


def test_what_an_async_endpoint_printed_is_shown_before_the_result(procs: Any, printed: Printed) -> None:
    speakers = procs.spawn("async_speakers", AsyncSpeaker)
    for number in range(COUNT):
        assert list(speakers.say.call(f"async {number}.").get().values()) == [0, 1, 2, 3]
        assert ranks_shown(f"async {number}.", printed) == 4


def test_what_a_concurrent_endpoint_printed_is_shown_before_the_result(procs: Any, printed: Printed) -> None:
    speakers = procs.spawn("concurrent_speakers", ConcurrentSpeaker)
    for number in range(COUNT):
        assert list(speakers.say.call(f"concurrent {number}.").get().values()) == [0, 1, 2, 3]
        assert ranks_shown(f"concurrent {number}.", printed) == 4


@pytest.mark.parametrize("Class", [Speaker, AsyncSpeaker])
def test_what_calls_in_flight_printed_is_shown_before_the_result_of_each(
    procs: Any, Class: type, printed: Printed
) -> None:
    one = procs.spawn("in_flight", Class).slice(hosts=0, gpus=0)
    for future in [one.say.call_one("before.") for _ in range(IN_FLIGHT)]:
        future.get()
    futures = [one.say.call_one(f"in flight {number}.") for number in range(IN_FLIGHT)]
    for number, future in enumerate(futures):
        future.get()
        assert f"in flight {number}." in printed.out


@pytest.mark.parametrize("Class", [Speaker, AsyncSpeaker])
def test_what_was_printed_is_shown_before_the_exception(procs: Any, Class: type, printed: Printed) -> None:
    speakers = procs.spawn("failing", Class)
    for number in range(COUNT):
        with pytest.raises(ActorError, match=f"error {number}"):
            speakers.raise_error.call(f"error {number}.").get()
        assert ranks_shown(f"error {number}.", printed) == 4


def test_one_rank_that_is_asked_waits_for_its_own_output(speakers: Any, printed: Printed) -> None:
    for number in range(COUNT):
        assert speakers.slice(hosts=1, gpus=1).say.call_one(f"one {number}.").get() == 3
        assert ranks_shown(f"one {number}.", printed) == 1


def test_an_item_of_a_stream_waits_for_the_output_of_its_rank(speakers: Any, printed: Printed) -> None:
    shown = 0
    for future in speakers.say.stream("stream."):
        future.get()
        shown += 1
        assert ranks_shown("stream.", printed) >= 1 or shown > 1
    assert shown == 4


@pytest.mark.parametrize("Class", [Speaker, AsyncSpeaker])
def test_replies_of_actors_to_actors_keep_their_ranks(procs: Any, speakers: Any, Class: type, printed: Printed) -> None:
    asking = procs.spawn("asking", Class)
    for number in range(COUNT):
        text = f"{Class.__name__} {number}."
        assert asking.slice(hosts=0, gpus=1).say_then_ask.call_one(speakers, text).get() == [0, 1, 2, 3]
        assert ranks_shown(text, printed) >= 1


def ranks_shown(text: str, printed: Printed) -> int:
    """How many ranks' lines with this text have been printed here."""
    lines = [line for line in "".join(printed.take()).splitlines() if line.endswith(text)]
    counts = [re.match(r"\[.*?(\d+) ranks", line) for line in lines]
    return sum(int(count.group(1)) if count else 1 for count in counts)
