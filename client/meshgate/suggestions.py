"""What a wrong name may stand for, as the end of an error message.

Errors are formatted when someone tries a name that does not exist, which libraries do with every object: special and
private names (``__len__``, ``_repr_svg_``) must never come here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

SIMILAR = 0.65  # below it, names of this size share no more than some letters
MOST_NAMES = 20
MOST_CHARACTERS = 100  # of a name: comparing long ones takes long
# What programs do with numbers and arrays, not with what holds them: Python would only say that it is not supported.
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OTHER = ("lt", "le", "gt", "ge", "neg", "abs", "float", "int", "index")
OPERATORS = [*(f"__{side}{name}__" for name in _BINARY for side in ("", "r")), *(f"__{name}__" for name in _OTHER)]
_COUNTS = {"hosts", "nodes", "num_hosts", "num_nodes", "num_replicas", "replicas", "workers"}
F = TypeVar("F", bound=Callable[..., None])


def closest(name: str, known: Iterable[str]) -> str:
    """The public name of ``known`` that is most similar to ``name``, whatever their case; "" if none is."""
    from difflib import get_close_matches  # noqa: PLC0415 - keeps the import of meshgate cheap

    folded = {each.lower(): each for each in sorted(known) if not each.startswith("_")}
    found = get_close_matches(name.lower(), folded, 1, SIMILAR) if len(name) <= MOST_CHARACTERS else []
    return folded[found[0]] if found else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``. Did you mean 'step'?``, or "" if no name is similar."""
    found = closest(name, known)
    return f". Did you mean {found!r}?" if found else ""


def names_text(names: Iterable[str]) -> str:
    """``step, evaluate and 3 more``"""
    listed = list(names)
    more = f" and {len(listed) - MOST_NAMES} more" if len(listed) > MOST_NAMES else ""
    return ", ".join(listed[:MOST_NAMES]) + more


def wrong_arguments(
    error: TypeError, signature: inspect.Signature, kwargs: Mapping[str, Any], placeholders: int = 1
) -> str:
    """The message of ``error``, and for keywords that are not parameters, what they may stand for.

    Python names a missing argument first, which a misspelt one is as well. ``placeholders``: the number of leading
    parameters that the caller does not pass.
    """
    parameters = list(signature.parameters.values())[placeholders:]
    names = [each.name for each in parameters if each.kind is not each.VAR_POSITIONAL]
    unknown = [name for name in kwargs if name not in names]
    if not unknown or any(each.kind is each.VAR_KEYWORD for each in parameters):
        return str(error)
    listed = ", ".join(map(repr, unknown))
    text = str(error)
    if listed not in text:
        text += f". {listed} {'is not a parameter' if len(unknown) == 1 else 'are not parameters'}"
    meant = did_you_mean(unknown[0], (name for name in names if name not in kwargs)) if len(unknown) == 1 else ""
    return text + (meant or f". The parameters: {names_text(names) or 'none'}")


def explains_arguments(instead: Callable[[Mapping[str, Any]], str] = lambda unknown: "") -> Callable[[F], F]:
    """Decorates a constructor: arguments that do not fit are explained as by ``wrong_arguments``, or as ``instead``
    explains the unknown keywords. Type checkers see the constructor itself."""

    def decorate(init: F) -> F:
        @functools.wraps(init)
        def checked(*args: Any, **kwargs: Any) -> None:
            signature = inspect.signature(init)  # not when the module is imported, which every program waits for
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                unknown = {name: value for name, value in kwargs.items() if name not in signature.parameters}
                meant = instead(unknown) if unknown else ""
                text = f"{error}: {meant}" if meant else wrong_arguments(error, signature, kwargs)
                raise TypeError(f"{type(args[0]).__name__}: {text}") from None
            init(*args, **kwargs)

        return cast("F", checked)

    return decorate


def counts_as_meshes(unknown: Mapping[str, Any]) -> str:
    """What to write instead of a keyword that says how many hosts there shall be."""
    counts = [count for name, count in unknown.items() if name in _COUNTS]
    return f"write meshes={{'workers': {counts[0]!r}}}" if counts else ""
