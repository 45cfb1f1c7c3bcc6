"""Label selectors in the syntax of ``kubectl -l``, and as objects. Pure.

An invalid selector is rejected here, before half of a job is created. So are ``>`` and ``<``, which a NetworkPolicy
does not support.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from meshgate_kubernetes.manifests.names import is_label_key, is_label_value

LABEL_RULE = "at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends"
_SET = re.compile(r"(\S+)\s+(in|notin)\s*\(([^()]*)\)")
_EQUAL = re.compile(r"([^=!\s]+)\s*(==|=|!=)\s*(.*)")


class _Term(NamedTuple):
    key: str
    operator: str  # Equal, In, NotIn, Exists or DoesNotExist
    values: tuple[str, ...] = ()


def parse_selector(selector: str) -> dict[str, str]:
    """The ``key=value`` terms of a label selector, without its other terms. Raises ValueError if the selector is
    empty or invalid."""
    return {term.key: term.values[0] for term in _terms(selector) if term.operator == "Equal"}


def selector_object(selector: str) -> dict[str, Any]:
    """A label selector as an object. Raises ValueError like ``parse_selector``."""
    terms = list(_terms(selector))
    equalities = {term.key: term.values[0] for term in terms if term.operator == "Equal"}
    expressions = [
        {"key": term.key, "operator": term.operator, **({"values": list(term.values)} if term.values else {})}
        for term in terms
        if term.operator != "Equal"
    ]
    return {
        **({"matchLabels": equalities} if equalities else {}),
        **({"matchExpressions": expressions} if expressions else {}),
    }


def _terms(selector: str) -> Iterator[_Term]:
    if not selector.strip():
        raise ValueError("the label selector is empty: it would match every pod of the namespace")
    for text in re.split(r",(?![^(]*\))", selector):
        term = _term(text.strip())
        if term is None or not is_label_key(term.key):
            raise ValueError(
                f"invalid label selector {selector!r}: {text.strip()!r} must be key=value, key!=value, "
                "key in (a, b), key notin (a, b), key or !key"
            )
        for value in term.values:
            if not is_label_value(value):
                raise ValueError(f"invalid value {value!r} of label {term.key!r}: use {LABEL_RULE}")
        yield term


def _term(text: str) -> _Term | None:
    if match := _SET.fullmatch(text):
        values = tuple(value.strip() for value in match[3].split(","))
        return _Term(match[1], "In" if match[2] == "in" else "NotIn", values)
    if match := _EQUAL.fullmatch(text):
        return _Term(match[1], "NotIn" if match[2] == "!=" else "Equal", (match[3].strip(),))
    if text.startswith("!"):
        return _Term(text[1:].strip(), "DoesNotExist")
    return _Term(text, "Exists") if text else None
