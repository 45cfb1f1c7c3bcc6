"""Reads the error texts of Monarch, which the supported releases word alike."""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshgate_gateway.engine.monarch.same_versions import version_problem

# A worker of the gateway's release would take this message, with which attaching begins. Another forwards it to itself.
_REFUSED = re.compile(
    r"undeliverable message to host_agent\.\S*?@(\S+):\n.*::SetClientConfig\n.*delivery failure: ttl expired", re.DOTALL
)
_STOPPED = re.compile(r"has status:\s+stopped\b")
_KILLED = "Killed(sig=9)"
_KILLED_HINT = " (if nothing sent the signal, the kernel did: the machine or the pod ran out of memory)"


def error_text(error: BaseException) -> str:
    """The message of ``error`` without the Rust backtrace that Monarch appends, or only that of a version check."""
    report = str(error).partition("\n\nStack backtrace:\n")[0].rstrip()
    return version_problem(report) or report


def unreachable_addresses(report: str, addresses: Sequence[str]) -> list[str]:
    """Those of ``addresses`` that did not answer, if ``report`` is about a failed attach."""
    if not report.startswith("attach failed"):
        return []
    return [address for address in addresses if re.search(rf"{re.escape(address.replace('://', ':'))}\b", report)]


def refusing_address(report: str) -> str:
    """The address of a worker that answers, but does not know the host that was attached to there: it has another
    release of Monarch, or another identity. Empty if ``report`` is about something else."""
    found = _REFUSED.search(report)
    return found[1] if found else ""


def reports_a_stop(report: str) -> bool:
    """Whether ``report`` is about an actor that ended without a failure: Monarch reports that to calls alone."""
    return _STOPPED.search(report) is not None


def explain_fault(report: str) -> str:
    """``report``, with a likely cause if a process got SIGKILL; if a version check failed, only its error."""
    return version_problem(report) or (f"{report}{_KILLED_HINT}" if _KILLED in report else report)
