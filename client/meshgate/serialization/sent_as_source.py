"""meshgate's own actor classes, sent to workers as the source text of their module.

A worker pod may have only torchmonarch and another Python version than the laptop, so it can neither import these
classes nor run their bytecode. On the laptop each is an ordinary actor class with the metaclass ``SentAsSource`` and is
spawned like any other.

Its module must contain the line ``REQUIRED_IMPORT`` and import only the standard library and Monarch otherwise. The
exception is a line that ends with ``INCLUDE_COMMENT``, which is replaced by the source of the module that it imports.
Other imports are refused here, before anything is sent: hosts would fail with ModuleNotFoundError. Endpoints must
return and raise built-in types only.
"""

from __future__ import annotations

import ast
import copyreg
import functools
import hashlib
import importlib
import inspect
import re
import sys
from abc import ABCMeta
from typing import Any

from meshgate.actors.api import Actor, endpoint
from meshgate.serialization.stale_source import parse_source

__all__ = ["INCLUDE_COMMENT", "REQUIRED_IMPORT", "Actor", "SentAsSource", "endpoint"]

REQUIRED_IMPORT = "from meshgate.serialization.sent_as_source import Actor, SentAsSource, endpoint\n"
INCLUDE_COMMENT = "  # sent along"
_INCLUDED = re.compile(rf"^from (\S+) import .*{INCLUDE_COMMENT}\n", re.MULTILINE)
_FUTURE = "from __future__ import annotations\n"
_ON_WORKERS = sys.stdlib_module_names | {"monarch"}
_WORKER_IMPORT = "from monarch.actor import Actor, endpoint; SentAsSource = type(Actor)\n"


class SentAsSource(ABCMeta):
    """Metaclass of actor classes that are pickled as the source of their module."""


def _load(name: str, text: str, attribute: str) -> Any:
    """Runs on the worker: returns the class from a module that is created once for each version of the text.

    Actors of one process may load their classes at the same time, each on its own thread, so it takes a lock that all
    versions of this function share.
    """
    import linecache  # noqa: PLC0415 - the source of this function is sent alone
    import sys  # noqa: PLC0415
    import threading  # noqa: PLC0415
    import types  # noqa: PLC0415

    with vars(sys).setdefault("_meshgate_load_lock", threading.RLock()):
        module = sys.modules.get(name)
        if module is None:
            module = types.ModuleType(name)
            filename = f"<{name}>"
            linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
            sys.modules[name] = module
            exec(compile(text, filename, "exec", dont_inherit=True), vars(module))  # noqa: S102 - meshgate's own text
    return getattr(module, attribute)


def _reduce(Class: SentAsSource) -> tuple[Any, ...]:
    text = inspect.getsource(sys.modules[Class.__module__])
    if REQUIRED_IMPORT not in text:
        raise TypeError(f"cannot send {Class.__module__}: it does not contain the line {REQUIRED_IMPORT!r}")
    text = _with_included(text.replace(REQUIRED_IMPORT, _WORKER_IMPORT))
    _check_imports(text, Class.__module__)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    names = {"code": inspect.getsource(_load), "text": text, "attribute": Class.__name__}
    names["name"] = f"{Class.__module__.replace('.', '_')}_{digest}"
    return eval, ("(exec('from __future__ import annotations\\n' + code), _load(name, text, attribute))[1]", names)


def _with_included(text: str) -> str:
    """``text`` with the sources of the modules that it, and in turn these, include."""
    return _INCLUDED.sub(lambda line: _with_included(_source(line[1])), text)


@functools.lru_cache(maxsize=64)
def _check_imports(text: str, module: str) -> None:
    """Raises TypeError if ``text``, the source of ``module`` as it is sent, imports what a worker may not have."""
    for node in ast.walk(parse_source(text)):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        else:
            continue
        for name in names:
            if name.partition(".")[0] not in _ON_WORKERS:
                raise TypeError(
                    f"cannot send {module}: it, or a module sent along, imports {name}, which hosts may not have "
                    f"({ast.unparse(node)}). Import it as `from {name} import ...{INCLUDE_COMMENT}`, on one line "
                    "without indentation, or do without it"
                )


def _source(module: str) -> str:
    return inspect.getsource(importlib.import_module(module)).replace(_FUTURE, "")


copyreg.pickle(SentAsSource, _reduce)
