"""Benchmarks of calls, arrays, latency, disconnects and memory. Each yields rows of the table, with targets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.peer import RunningPeer
from benchmarks.processes import ROOT, cpu_of
from benchmarks.results import Case, Check, Value, at_least, at_most, median, percentile
from benchmarks.run import Peers, Run

Rows = Iterator[Case]
MB = 1_000_000
ROUND_TRIP = 0.05
SLOW_LINK = 20_000_000 / 8  # bytes a second


def start(run: Run) -> Rows:
    """From the start of a driver process to its first result of two hosts, with and without imports."""
    with run.ray():
        drivers = {"direct": ["direct"], "meshgate": ["meshgate"]}
        if run.ray_address is not None:
            drivers["ray"] = ["ray", run.ray_address]
        without: dict[str, list[float]] = {}
        whole: dict[str, list[float]] = {}
        for turn in range(-1, run.rounds):
            for name, arguments in list(drivers.items()):
                try:
                    excluded, included = run.measure(partial(_start_once, run, name, arguments))
                except (subprocess.SubprocessError, ValueError) as error:
                    run.report_problem(f"cannot start {name}: {error}")
                    del drivers[name]
                    continue
                if turn >= 0:
                    without.setdefault(name, []).append(excluded)
                    whole.setdefault(name, []).append(included)
    case = Case("start: job to first result", {name: Value("s", tuple(found)) for name, found in without.items()})
    if {"direct", "meshgate"} <= without.keys():
        additional = case.columns["meshgate"].number - case.columns["direct"].number
        case.checks += at_most("in addition to direct", additional, 1.0, unit=" s")
    case.note = "Ray joins a running cluster"
    yield case
    yield Case("start, including imports", {name: Value("s", tuple(found)) for name, found in whole.items()})


def _start_once(run: Run, name: str, arguments: list[str]) -> tuple[float, float]:
    python = run.ray_python if name == "ray" else None
    start = time.monotonic()
    with (run.logs / f"start-{name}.log").open("wb") as errors:
        done = subprocess.run(
            [python or sys.executable, "-m", "benchmarks.start", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=True,
        )
    times = json.loads(done.stdout.splitlines()[-1])
    return times["result"] - times["imported"], times["result"] - start


def calls(run: Run) -> Rows:
    """Sequential calls, 1,000 calls in flight and arrays, on one machine without delay."""
    with run.ray(), run.peers(direct={}, meshgate={}, tcp={"tcp": True}, ray={}, websocket={}) as peers:
        yield from _sequential(peers)
        yield from _in_flight(peers)
        yield from _arrays(peers)


def _sequential(peers: Peers) -> Rows:
    for actors in (1, 4):
        found = peers.turns("direct", "meshgate", "ray", method="sequential", actors=actors, calls=200)
        case = Case(f"sequential calls to {actors} actor{'s' * (actors > 1)}", _medians_ms(found))
        case.checks += at_most("compared with direct:", case.ratio("meshgate", "direct"), 1.3)
        case.checks += at_least("speed compared with Ray:", case.ratio("ray", "meshgate"), 2)
        yield case
    found = peers.turns("direct", "meshgate", method="sequential_async", calls=200)
    case = Case("sequential calls to 1 actor, await", _medians_ms(found))
    case.checks += at_most("compared with direct:", case.ratio("meshgate", "direct"), 1.3)
    yield case
    found = peers.turns("direct", "tcp", method="sequential", actors=1, calls=200)
    bare = peers.turns("websocket", method="round_trip", calls=200)
    case = Case("sequential calls to 1 actor, over TCP", _medians_ms({**found, **bare}), beside="bare websocket")
    case.rename(tcp="meshgate", websocket="other")
    if (ratio := case.ratio("meshgate", "direct")) is not None:
        case.note = f"{ratio:.2f} times direct"
    yield case


def _in_flight(peers: Peers) -> Rows:
    names = ("direct", "meshgate", "ray")
    gathered, gathered_cpu = _with_processor_time(peers, names, "in_flight_async")
    listed, listed_cpu = _with_processor_time(peers, names, "in_flight")
    reference = {**_rates(gathered), "ray": _best(_rates(gathered), _rates(listed), "ray")}
    for how, found, used in (("asyncio", gathered, gathered_cpu), ("list of futures", listed, listed_cpu)):
        columns = {name: value for name, value in _rates(found).items() if value is not None}
        case = Case(f"1,000 calls in flight, {how}", columns)
        for peer, what, minimum in (("direct", "compared with direct:", 0.9), ("ray", "compared with Ray:", 4)):
            beside = reference.get(peer)
            if beside is not None and "meshgate" in columns:
                case.checks += at_least(what, columns["meshgate"].number / beside.number, minimum)
        taken = ", ".join(f"{name} {median(each) * 1e3:.0f} µs" for name, each in used.items() if name != "ray")
        case.note = (
            f"compared with direct Monarch's gather and the better one of Ray's; processor time of all processes of a "
            f"driver, for each call: {taken}"
        )
        yield case


def _with_processor_time(
    peers: Peers, names: tuple[str, ...], method: str
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Of each round of 1,000 calls, the seconds, and those of processors in the peer's process and its descendants."""

    def ask(peer: RunningPeer) -> tuple[float, float]:
        before = cpu_of(peer.pid)
        seconds = peer.ask(method, calls=1000)
        return seconds, cpu_of(peer.pid) - before

    found = peers.turns_of(ask, names, None, warm=True)
    return (
        {name: [seconds for seconds, _ in rounds] for name, rounds in found.items()},
        {name: [used for _, used in rounds] for name, rounds in found.items()},
    )


def _best(one: dict[str, Value], other: dict[str, Value], name: str) -> Value | None:
    found = [values[name] for values in (one, other) if name in values]
    return max(found, key=lambda value: value.number, default=None)


def _arrays(peers: Peers) -> Rows:
    for megabytes, times in ((1, 10), (10, 4), (100, 1)):
        for direction in ("up", "down"):
            found = peers.turns(
                *("direct", "meshgate", "ray", "websocket"),
                method=f"array_{direction}",
                nbytes=megabytes * MB,
                times=times,
            )
            columns = {
                name: Value("MB/s", tuple(megabytes / median(seconds) for seconds in rounds))
                for name, rounds in found.items()
            }
            case = Case(f"array of {megabytes} MB, {direction}", columns, beside="bare websocket")
            case.rename(websocket="other")
            if megabytes == 100:
                case.checks += at_least("compared with direct:", case.ratio("meshgate", "direct"), 0.7)
                case.checks += at_least("compared with Ray:", case.ratio("meshgate", "ray"), 2)
            yield case


def sharing(run: Run) -> Rows:
    """Small calls during a transfer of 1 GB to another mesh on the same session, and on an idle session."""
    with run.peers(direct={}, meshgate={}) as peers:
        idle = peers.turns("direct", "meshgate", method="small_idle", calls=1000, rounds=3)
        idle99 = {name: median(percentile(calls, 0.99) for calls in rounds) for name, rounds in idle.items()}
        yield Case("100-byte call on an idle session, median", _medians_ms(idle))
        yield Case("  99th percentile", _percentiles(idle))
        for direction in ("up", "down"):
            found = peers.turns(
                "direct", "meshgate", method="small_while", direction=direction, nbytes=1000 * MB, rounds=2, warm=False
            )
            busy = {name: [each["calls"] for each in rounds if each["calls"]] for name, rounds in found.items()}
            yield Case(f"100-byte call during 1 GB {direction}, median", _medians_ms(busy))
            case = Case("  99th percentile", _percentiles(busy))
            for name, what in (("meshgate", "compared with idle:"), ("direct", "direct compared with idle:")):
                if name in case.columns and name == "meshgate":
                    case.checks += at_most(what, case.columns[name].number / (idle99[name] * 1e3), 3)
                elif name in case.columns:
                    case.note = f"{what} {case.columns[name].number / (idle99[name] * 1e3):.2f} times"
            yield case
            worst = {name: Value("ms", tuple(max(calls) * 1e3 for calls in rounds)) for name, rounds in busy.items()}
            yield Case("  maximum", worst)
            rates = {
                name: Value("MB/s", tuple(1000 / each["transfer"] for each in rounds)) for name, rounds in found.items()
            }
            yield Case("  throughput of the transfer", rates)


def distance(run: Run) -> Rows:
    """A network proxy adds a round trip of 50 ms between the driver and everything else, except for direct Monarch."""
    far = {"round_trip": ROUND_TRIP}
    with run.ray(), run.peers(direct={}, meshgate=far, attach=far, ray=far) as peers:
        found = peers.turns("direct", "meshgate", "attach", method="chain", rounds=run.rounds)
        case = Case("spawn_procs, spawn, call, get at 50 ms", _totals_ms(found), beside="attach mode")
        _check_round_trips(case)
        case.checks += at_least("speed compared with attach mode:", case.ratio("other", "meshgate"), 2)
        case.note = "direct without the delay"
        yield case
        one = peers.turns("meshgate", "attach", "ray", method="sequential", actors=1, calls=5)
        yield _beside_attach(Case("one call at 50 ms", _medians_ms(one)))
        several = peers.turns("meshgate", "attach", "ray", method="in_flight", calls=100)
        yield _beside_attach(Case("100 calls at 50 ms", _totals_ms(several)))


def _beside_attach(case: Case) -> Case:
    case.rename(attach="other")
    case.beside = "attach mode"
    case.checks += at_most("compared with attach mode:", case.ratio("meshgate", "other"), 1.03)
    case.checks += at_least("speed compared with Ray:", case.ratio("ray", "meshgate"), 2)
    return case


def kept(run: Run) -> Rows:
    """An array that one actor hands to another on the other host: with ``keep()``, and written by hand.

    Then a loop in which each trainer gets the array of the generator of its rank, over a slow link. Ray's actors are on
    one node, whose object store they share.
    """
    names = ("direct", "meshgate", "ray")
    with run.ray(), run.peers(direct={}, meshgate={}, ray={}) as peers:
        for megabytes in (10, 100):
            arguments = {"nbytes": megabytes * MB, "times": 5}
            found = peers.turns(*names, method="hand_over", **arguments)
            by_hand = peers.turns("meshgate", method="hand_over_without_keep", **arguments)
            columns = {
                name: Value("MB/s", tuple(megabytes / median(seconds) for seconds in rounds))
                for name, rounds in {**found, "other": by_hand.get("meshgate", [])}.items()
                if rounds
            }
            case = Case(f"array of {megabytes} MB, from actor to actor", columns, beside="by hand, through the gateway")
            case.checks += at_least("compared with direct:", case.ratio("meshgate", "direct"), 0.9)
            yield case
    with run.ray(), run.peers(direct={}, meshgate={"round_trip": ROUND_TRIP}, ray={"round_trip": ROUND_TRIP}) as peers:
        found = peers.turns(*names, method="hand_over", nbytes=10 * MB, times=10)
        case = Case(
            "array of 10 MB, from actor to actor, at 50 ms", _medians_ms(found), note="direct without the delay"
        )
        _check_round_trips(case)
        yield case

    slow = {"round_trip": ROUND_TRIP, "rate": SLOW_LINK}
    with run.ray(), run.peers(direct={}, meshgate=slow, ray=slow) as peers:
        found = peers.turns(*names, method="loop", nbytes=10 * MB, times=10)
        case = Case(
            "loop generator → trainer, 10 MB a rank, at 50 ms and 20 Mbit/s",
            _medians_ms(found),
            note="an iteration of 4 ranks; direct without the link, as a driver in the cluster",
        )
        _check_round_trips(case)
        yield case


def _check_round_trips(case: Case) -> None:
    """In addition to direct Monarch, which has no link."""
    if {"direct", "meshgate"} <= case.columns.keys():
        more = (case.columns["meshgate"].number - case.columns["direct"].number) / (ROUND_TRIP * 1e3)
        case.checks.append(Check(f"additional round trips: {more:.2f}", more, "1 (below 1.5)", more < 1.5))


def cuts(run: Run) -> Rows:
    """1,000 resets of the connection during 10,000 calls."""
    with run.peers(meshgate={"cuts": True}) as peers:
        arguments = {"calls": 10_000, "cuts": 1_000, "window": 64, "timeout": 180.0}
        found = peers.turns("meshgate", method="calls_with_cuts", rounds=1, warm=False, **arguments)
        for result in found.get("meshgate", []):
            case = Case("1,000 cuts in 10,000 calls", {"meshgate": Value("s", (result["seconds"],))})
            kept = not result["lost"] and not result["twice"] and result["in_order"] and result["cuts"] == 1_000
            text = f"{result['lost']} lost, {result['twice']} run twice, {'' if result['in_order'] else 'not '}in order"
            case.checks.append(Check(text, float(kept), "0, 0, in order", kept))
            case.note = f"{result['replayed']:,} frames replayed"
            yield case


def memory(run: Run) -> Rows:
    """Resident memory before and after 20,000 calls. Direct Monarch's driver is compared with the engine."""
    with run.peers(direct={}, meshgate={}) as peers:
        both = ("direct", "meshgate")
        peers.turns(*both, method="in_flight", calls=1000, rounds=2, warm=False)
        before = peers.turns(*both, method="memory", rounds=1, warm=False)
        peers.turns(*both, method="in_flight", calls=1000, rounds=20, warm=False)
        after = peers.turns(*both, method="memory", rounds=1, warm=False)
        for process in ("server", "engine", "client"):
            case = Case(f"memory of the {process} after 20,000 calls")
            grown = []
            for name, found in after.items():
                if found and process in found[0]:
                    case.columns[name] = Value("MB", (found[0][process] / MB,))
                    grown.append(f"{name} {(found[0][process] - before[name][0][process]) / MB:+.1f} MB")
            case.note = f"since 2,000 calls: {', '.join(grown)}"
            yield case


def imports(run: Run) -> Rows:
    """A new process, from its start until it has imported what a program begins with, or printed its help."""
    programs = {"direct": "from monarch.job import ProcessJob", "meshgate": "from meshgate import ProcessJob"}
    found = _processes(run, {name: [sys.executable, "-c", program] for name, program in programs.items()})
    case = Case("import of ProcessJob", _totals_ms(found), table="scale")
    case.checks += at_most("took", case.columns["meshgate"].number, 150, unit=" ms")
    yield case
    help_text = _processes(run, {"meshgate": [sys.executable, "-m", "meshgate", "--help"]})
    case = Case("meshgate --help", _totals_ms(help_text), table="scale")
    case.checks += at_most("took", case.columns["meshgate"].number, 150, unit=" ms")
    yield case


def _processes(run: Run, commands: dict[str, list[str]]) -> dict[str, list[float]]:
    """The seconds that each process takes, in turns, after a warm-up round."""
    found: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(-1, run.rounds):
        for name, command in commands.items():
            start = time.monotonic()
            run.measure(partial(subprocess.run, command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True))
            if turn >= 0:
                found[name].append(time.monotonic() - start)
    return found


def ranks(run: Run) -> Rows:
    """Calls to many processes."""
    with run.peers(direct={}, meshgate={}) as peers:
        for count, times in ((16, 100), (64, 30)):
            found = peers.turns("direct", "meshgate", method="to_ranks", ranks=count, calls=times, timeout=300.0)
            case = Case(f"sequential calls to {count} ranks", _medians_ms(found), table="scale")
            case.checks += at_most("compared with direct:", case.ratio("meshgate", "direct"), 1.2)
            yield case


def sessions(run: Run) -> Rows:
    """50 sessions on one gateway, each with an engine and an actor of its own, of which one at a time makes calls."""
    with run.peers(meshgate={}) as peers:
        once = partial(peers.turns, "meshgate", method="in_sessions", calls=200, rounds=1, warm=False, timeout=300.0)
        alone, beside = once(sessions=1)["meshgate"][0], once(sessions=50)["meshgate"][0]
    single = Value("ms", (median(alone["calls"][0]) * 1e3,))
    each = Value("ms", tuple(median(calls) * 1e3 for calls in beside["calls"]))
    worst = Value("ms", (max(each.rounds),))
    yield Case("call in each of 50 sessions", {"meshgate": each, "other": single}, beside="1 session", table="scale")
    yield Case("  in the slowest of them", {"meshgate": worst, "other": single}, beside="1 session", table="scale")
    engines = Value("MB", tuple(rss / MB for rss in beside["engines"]))
    before = Value("MB", (alone["engines"][0] / MB,))
    case = Case(
        "memory of a session's engine", {"meshgate": engines, "other": before}, beside="1 session", table="scale"
    )
    case.note = f"the server has {alone['server'] / MB:.0f} MB with 1 session and {beside['server'] / MB:.0f} with 50"
    yield case


def large(run: Run) -> Rows:
    """The most memory that an array of 1 GB takes, beside what the processes had before."""
    with run.peers(meshgate={}) as peers:
        for direction in ("up", "down"):
            found = peers.turns("meshgate", method="peak_memory", direction=direction, nbytes=1000 * MB, rounds=2)
            for process in ("engine", "client"):
                more = Value("MB", tuple(each[process] / MB for each in found["meshgate"]))
                case = Case(f"array of 1 GB {direction}, memory of the {process}", {"meshgate": more}, table="scale")
                case.checks += at_most("of its size", more.number / 1000, 2)
                yield case


def _medians_ms(found: dict[str, list[list[float]]]) -> dict[str, Value]:
    return _by_round(found, lambda seconds: median(seconds) * 1e3)


def _percentiles(found: dict[str, list[list[float]]]) -> dict[str, Value]:
    return _by_round(found, lambda seconds: percentile(seconds, 0.99) * 1e3)


def _totals_ms(found: dict[str, list[float]]) -> dict[str, Value]:
    values = _by_round(found, lambda seconds: seconds * 1e3)
    return {("other" if name == "attach" else name): value for name, value in values.items()}


def _rates(found: dict[str, list[float]]) -> dict[str, Value]:
    return {name: Value("/s", tuple(1000 / seconds for seconds in rounds)) for name, rounds in found.items()}


def _by_round(found: dict[str, list[Any]], number: Callable[[Any], float]) -> dict[str, Value]:
    return {name: Value("ms", tuple(number(each) for each in rounds)) for name, rounds in found.items()}


GROUPS: dict[str, Callable[[Run], Rows]] = {
    "start": start,
    "calls": calls,
    "sharing": sharing,
    "distance": distance,
    "kept": kept,
    "cuts": cuts,
    "memory": memory,
    "imports": imports,
    "ranks": ranks,
    "sessions": sessions,
    "large": large,
}
