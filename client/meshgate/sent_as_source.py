"""Actor classes of meshgate's own, delivered as the text of their module.

A worker pod may hold nothing but torchmonarch, and another Python than the laptop's: so these classes travel neither
by name nor as byte code. A module that holds one has the line ``IMPORT``, and otherwise uses the standard library
alone, or modules that do so, on lines that end with ``ALONG``: their text takes the place of the line. The class is
an ordinary actor class here, with the metaclass ``SentAsSource``, and is spawned like any other. What its endpoints
return and raise must be Python's own.
"""

from __future__ import annotations

import copyreg
import hashlib
import importlib
import inspect
import re
import sys
from abc import ABCMeta
from typing import Any

from meshgate.actors import Actor, endpoint

__all__ = ["ALONG", "IMPORT", "Actor", "SentAsSource", "endpoint"]

IMPORT = "from meshgate.sent_as_source import Actor, SentAsSource, endpoint\n"
ALONG = "  # sent along"
_ALONG = re.compile(rf"^from (\S+) import .*{ALONG}\n", re.MULTILINE)
_FUTURE = "from __future__ import annotations\n"
_THERE = "from monarch.actor import Actor, endpoint; SentAsSource = type(Actor)\n"


class SentAsSource(ABCMeta):
    """The metaclass of an actor class that pickles as the source of its module."""


def _load(name: str, text: str, attribute: str) -> Any:
    """On the worker: the class, from a module made once for each version of the text."""
    import linecache  # noqa: PLC0415 - its text is sent alone
    import sys  # noqa: PLC0415
    import types  # noqa: PLC0415

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
    if IMPORT not in text:
        raise TypeError(f"{Class.__module__} does not hold the line {IMPORT!r}")
    text = _ALONG.sub(lambda line: _text_of(line[1]), text.replace(IMPORT, _THERE))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    names = {"code": inspect.getsource(_load), "text": text, "attribute": Class.__name__}
    names["name"] = f"{Class.__module__.replace('.', '_')}_{digest}"
    return eval, ("(exec('from __future__ import annotations\\n' + code), _load(name, text, attribute))[1]", names)


def _text_of(module: str) -> str:
    """The module's text, to stand in the middle of another."""
    return inspect.getsource(importlib.import_module(module)).replace(_FUTURE, "")


copyreg.pickle(SentAsSource, _reduce)
