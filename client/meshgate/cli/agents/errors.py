"""Exceptions as data."""

from __future__ import annotations

import traceback

from meshgate.cli.models import ErrorGroup, ErrorReport
from meshgate.errors import ActorError
from meshgate.session.errors.remote_text import exception_line, readable_report


def error_report(error: BaseException) -> ErrorReport:
    """``error`` with its traceback here, and for a failed call what each group of ranks raised."""
    here = "".join(traceback.format_exception(error)) if error.__traceback__ is not None else ""
    if not isinstance(error, ActorError):
        return ErrorReport(type=type(error).__name__, message=str(error), traceback=here)
    raised = error.kinds[0].exception if error.kinds else error.exception
    groups = [
        ErrorGroup(
            ranks=list(kind.ranks),
            count=kind.count,
            message=exception_line(kind.exception_formatted) or kind.message,
            traceback=readable_report(kind.exception_formatted),
        )
        for kind in error.kinds
    ]
    return ErrorReport(
        type=type(raised).__name__ if raised is not None else type(error).__name__,
        message=str(raised) if raised is not None else error.message,
        traceback=here,
        endpoint=error.endpoint,
        groups=groups,
    )
