"""Runs a program as ``python PROGRAM`` does, and writes the exception that ends it to a file as well.

``BOOTSTRAP`` is the code of ``python -c``, so that the program's own ``__main__`` is the interpreter's.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import CodeType, TracebackType

from meshgate.caller import theirs
from meshgate.cli.models import ErrorGroup, ErrorReport
from meshgate.errors import ActorError, MeshgateError
from meshgate.session.errors.failures import headline, readable_report

BOOTSTRAP = f"exec(__import__({__name__!r}, fromlist=['prepare']).prepare(*__import__('sys').argv[1:]))"


def prepare(report: str, directory: str, program: str, *arguments: str) -> CodeType:
    """The code of ``program``, to be executed in ``__main__``. Modules are found in ``directory`` first.

    An exception that ends the program is printed as usual, and written to the file ``report``.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        error.__traceback__ = trace.tb_next if trace is not None else None  # without the bootstrap's frame
        error.__traceback__ = own = theirs(error, MeshgateError)
        Path(report).write_text(error_report(error).model_dump_json(), encoding="utf-8")
        sys.__excepthook__(kind, error, own)

    sys.excepthook = hook
    sys.argv = [program, *arguments]
    sys.path[0] = directory
    sys.modules["__main__"].__file__ = program
    return compile(Path(program).read_bytes(), program, "exec")


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
            message=headline(kind),
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
