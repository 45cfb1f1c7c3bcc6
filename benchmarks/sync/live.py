"""From save to the first call that runs the new line, with ``watch=True``."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.results import Case, Value, median, percentile
from benchmarks.run import Run

_HOW = {
    "reload": "reload(), then a call of running actors",
    "spawn": "new actors in running processes",
    "fresh": "new processes",
}
_SAVES = 10


def from_save_to_call(run: Run) -> Iterator[Case]:
    with run.peers(saving={}) as peers:
        for how, name in _HOW.items():
            found = peers.turns("saving", method="saves", rounds=3 if how != "fresh" else 2, how=how, times=_SAVES)
            rounds = found.get("saving", [])
            saves = tuple(seconds * 1e3 for each in rounds for seconds in each)
            if saves:
                columns = {
                    "median": Value("ms", tuple(median(each) * 1e3 for each in rounds)),
                    "p95": Value("ms", (percentile(saves, 0.95),)),
                    "worst": Value("ms", (max(saves),)),
                    "samples": Value("ms", saves),
                }
                yield Case(name, columns, table="live", note=f"{len(saves)} saves")
