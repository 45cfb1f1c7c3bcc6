"""What a user gives in place of lists and mappings, checked and refused by its name.

Text is a sequence too: ``secrets="hf-token"`` would be eight secrets of a letter each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["listed", "mapped", "own_labels_refused", "plain", "selector_text"]

_OWN_LABELS = ("meshgate.dev/", "app.kubernetes.io/component", "app.kubernetes.io/managed-by")


def listed(owner: str, name: str, value: Any) -> tuple[Any, ...]:
    """``value`` as a tuple. Raises TypeError on text, a mapping, and what cannot be gone through; None is empty."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{owner}({name}={value!r}): expected a list, such as {name}=[…]")
    return tuple(value)


def mapped(owner: str, name: str, value: Any) -> dict[Any, Any]:
    """``value`` as a dict. Raises TypeError on anything but a mapping; None is empty."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{owner}({name}={value!r}): expected a mapping, such as {name}={{'key': 'value'}}")
    return dict(value)


def own_labels_refused(owner: str, labels: Mapping[Any, Any]) -> None:
    """Raises ValueError on labels by which meshgate finds what is a job's."""
    if own := [key for key in labels if str(key).startswith(_OWN_LABELS)]:
        raise ValueError(f"{owner}(labels): {own[0]!r} is set by meshgate itself")


def selector_text(selector: Any) -> str:
    """A label selector, given as text or as the labels that pods must have. Raises TypeError on anything else."""
    if isinstance(selector, str):
        return selector
    if not isinstance(selector, Mapping):
        raise TypeError(f"selector={selector!r}: expected labels, such as {{'app': 'my-workers'}}, or text")
    for key, value in selector.items():
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise TypeError(f"selector: the value of {key!r} is text, not {value!r}")
    return ",".join(f"{key}={value}" for key, value in selector.items())


def plain(raw: Any) -> Any:
    """``raw`` as JSON: mappings as they are, objects of the ``kubernetes`` package by their attribute maps."""
    if isinstance(raw, Mapping):
        return {str(key): plain(value) for key, value in raw.items()}
    if isinstance(raw, (list, tuple)):
        return [plain(each) for each in raw]
    names = getattr(raw, "attribute_map", None)
    if isinstance(names, Mapping):
        found = {json_name: getattr(raw, name) for name, json_name in names.items()}
        return {name: plain(value) for name, value in found.items() if value is not None}
    return raw
