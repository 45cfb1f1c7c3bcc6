"""Checks and conversions of arguments; their errors name the argument.

A string is a sequence too: without a check, ``secrets="hf-token"`` would be eight secrets of one letter each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

_RESERVED_LABELS = ("meshgate.dev/", "app.kubernetes.io/component", "app.kubernetes.io/managed-by")


def as_tuple(owner: str, name: str, value: Any) -> tuple[Any, ...]:
    """``value`` as a tuple; None is empty. Raises TypeError on a string, a mapping, or a value that is not iterable."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{owner}({name}={value!r}): expected a list, such as {name}=[…]")
    return tuple(value)


def as_dict(owner: str, name: str, value: Any) -> dict[Any, Any]:
    """``value`` as a dict; None is empty. Raises TypeError on anything but a mapping."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{owner}({name}={value!r}): expected a mapping, such as {name}={{'key': 'value'}}")
    return dict(value)


def as_json(raw: Any) -> Any:
    """``raw`` as JSON. Objects of the ``kubernetes`` package are converted by their attribute maps."""
    if isinstance(raw, Mapping):
        return {str(key): as_json(value) for key, value in raw.items()}
    if isinstance(raw, (list, tuple)):
        return [as_json(each) for each in raw]
    names = getattr(raw, "attribute_map", None)
    if isinstance(names, Mapping):
        found = {json_name: getattr(raw, name) for name, json_name in names.items()}
        return {name: as_json(value) for name, value in found.items() if value is not None}
    return raw


def reject_reserved_labels(owner: str, labels: Mapping[Any, Any]) -> None:
    """Raises ValueError on labels by which meshgate finds the objects of a job."""
    if reserved := [key for key in labels if str(key).startswith(_RESERVED_LABELS)]:
        raise ValueError(f"{owner}(labels): {reserved[0]!r} is reserved for meshgate; remove it")


def selector_text(selector: Any) -> str:
    """A label selector as text, from text or a mapping of labels. Raises TypeError on anything else."""
    if isinstance(selector, str):
        return selector
    if not isinstance(selector, Mapping):
        raise TypeError(f"selector={selector!r}: expected labels, such as {{'app': 'my-workers'}}, or text")
    for key, value in selector.items():
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise TypeError(f"selector: the value of {key!r} must be text, not {value!r}")
    return ",".join(f"{key}={value}" for key, value in selector.items())


def validation_text(owner: str, error: ValidationError) -> str:
    """The problems of a validation, one a line, each with the name of its argument."""
    lines = []
    for problem in error.errors(include_url=False):
        argument = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        value = "" if not argument or isinstance(problem["input"], (dict, list, tuple)) else f"={problem['input']!r}"
        lines.append(f"{owner}({argument}{value}): {message}" if argument else f"{owner}: {message}")
    return "\n".join(lines)
