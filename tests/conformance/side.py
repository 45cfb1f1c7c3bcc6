"""Runs the cases of one area on one side, in a process of its own; a JSON object a line for each case."""

from __future__ import annotations

import importlib
import inspect
import json
import signal
import sys
import time
import traceback
from types import FrameType, ModuleType
from typing import Any

from tests.conformance.cases import Case, Kit

CASE_SECONDS = 90
SIDES = ("direct", "gateway")


def cases_of(area: ModuleType) -> dict[str, Case]:
    """The public functions of an area, in the order of the file."""
    return {
        name: value
        for name, value in vars(area).items()
        if inspect.isfunction(value) and value.__module__ == area.__name__ and not name.startswith("_")
    }


def main(side: str, area_name: str, *names: str) -> None:
    area = importlib.import_module(f"tests.conformance.areas.{area_name}")
    api, jobs, job = _open(side)
    signal.signal(signal.SIGALRM, _out_of_time)
    try:
        hosts = job.state(cached_path=None).workers
        for name, case in cases_of(area).items():
            if not names or name in names:
                _report(name, case, Kit(api, jobs, hosts))
    finally:
        signal.alarm(0)
        job.kill()


def _open(side: str) -> tuple[ModuleType, ModuleType, Any]:
    if side == "direct":
        import monarch.actor
        import monarch.job

        monarch.actor.unhandled_fault_hook = lambda failure: None
        return monarch.actor, monarch.job, monarch.job.ProcessJob({"workers": 2})
    import meshgate

    meshgate.unhandled_fault_hook = lambda failure: None  # type: ignore[assignment]
    return meshgate, meshgate, meshgate.ProcessJob({"workers": 2})


def _report(name: str, case: Case, kit: Kit) -> None:
    began, error = time.monotonic(), ""
    signal.alarm(CASE_SECONDS)
    try:
        case(kit)
    except BaseException as failure:  # noqa: BLE001 - a panic of Monarch's derives from BaseException alone
        last = traceback.extract_tb(failure.__traceback__)
        where = next((frame.lineno for frame in reversed(last) if "conformance/areas" in frame.filename), 0)
        error = f"line {where}: {type(failure).__name__}: {failure}"
    signal.alarm(0)
    seconds = time.monotonic() - began
    print(json.dumps({"case": name, "passed": not error, "seconds": seconds, "error": error[:600]}), flush=True)
    signal.alarm(CASE_SECONDS)
    kit.stop_all()
    signal.alarm(0)


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the case was not over within {CASE_SECONDS} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
