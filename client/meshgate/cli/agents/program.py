"""Runs a program as ``python PROGRAM`` does, and writes the exception that ends it to a file as well.

``BOOTSTRAP`` is the code of ``python -c``, so that the program's own ``__main__`` is the interpreter's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, TracebackType

from meshgate.caller import theirs
from meshgate.cli.agents.errors import error_report
from meshgate.errors import MeshgateError

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
