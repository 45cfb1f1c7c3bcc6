"""How functions, methods and constructors differ from Monarch's: parameters, their kinds and defaults, and fields."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from meshgate.actors import monarch_surface as surface

__all__ = ["DIFFERENCES", "class_differences", "differences"]

_KUBETORCH = "the first parameters are Kubetorch's; Monarch's are accepted by name"

# Each difference that a program can notice, with its reason, on the supported releases.
DIFFERENCES = {
    "Extent.from_bytes(bytes)": "the parameter is `data`; only pickles call it",
    "Point.from_bytes(bytes)": "the parameter is `data`; only pickles call it",
    "monarch.job.SlurmJob(monarch_port)": "None: the job chooses free ports, so that jobs can share a node",
    "monarch.job.kubernetes.KubernetesJob(attach_to)": _KUBETORCH,
    "monarch.job.kubernetes.KubernetesJob(kubeconfig)": _KUBETORCH,
    "monarch.job.kubernetes.KubernetesJob(namespace)": _KUBETORCH,
    "monarch.job.kubernetes.KubernetesJob(timeout)": _KUBETORCH,
    "monarch.job.kubernetes.KubernetesJob.add_mesh(pod_template)": "keyword-only: an alias of `pod_spec`",
}

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def differences() -> dict[str, str]:
    """What differs from the installed Monarch, as in ``DIFFERENCES``, with what it is."""
    found: dict[str, str] = {}
    for name, theirs, ours in _pairs():
        if inspect.isclass(theirs):
            found.update(class_differences(name, theirs, ours))
            if _is_constructed(name):
                found.update(_of_call(name, theirs, ours))
        elif callable(theirs):
            found.update(_of_call(name, theirs, ours))
    return found


def _pairs() -> Iterator[tuple[str, Any, Any]]:
    """Monarch's functions and classes with what takes their place here, by the name under which each is listed."""
    actor = importlib.import_module("monarch.actor")
    ours = importlib.import_module("meshgate")
    for name in actor.__all__:
        if name not in surface.UNAVAILABLE and not inspect.isclass(getattr(actor, name)):
            yield name, getattr(actor, name), getattr(ours, name)
    classes = {**vars(actor), "ActorMesh": importlib.import_module("monarch._src.actor.actor_mesh").ActorMesh}
    for place, name in surface.OWNERS.items():
        yield name, classes[name], getattr(ours, place)
    for name, place in surface.AVAILABLE_JOB_NAMES.items():
        yield name, _resolve(name), _resolve(place)


def class_differences(name: str, theirs: Any, ours: Any) -> Iterator[tuple[str, str]]:
    """What the members of a class differ in, each with what it is."""
    listed = surface.UNAVAILABLE.keys() | surface.UNAVAILABLE_JOB_NAMES.keys()
    if dataclasses.is_dataclass(theirs):
        for field in {each.name for each in dataclasses.fields(theirs) if each.init} - _fields(ours):
            yield f"{name}.{field}", "field missing"
    for member in (each for each in dir(theirs) if not each.startswith("_") and f"{name}.{each}" not in listed):
        if dataclasses.is_dataclass(theirs) and member in theirs.__dataclass_fields__:
            continue
        if not hasattr(ours, member):
            yield f"{name}.{member}", "missing"
        elif callable(getattr(theirs, member)) != callable(getattr(ours, member)):
            yield f"{name}.{member}", "a method in one of the two, and a value in the other"
        elif callable(getattr(theirs, member)):
            yield from _of_call(f"{name}.{member}", getattr(theirs, member), getattr(ours, member))


def _is_constructed(name: str) -> bool:
    """Programs construct jobs and their settings, but no proxies. serve() makes an SPMDJob; JobTrait is abstract."""
    return name in surface.AVAILABLE_JOB_NAMES and not name.endswith((".SPMDJob", ".JobTrait"))


def _fields(cls: Any) -> set[str]:
    if dataclasses.is_dataclass(cls):
        return {each.name for each in dataclasses.fields(cls)}
    return set(cls.model_fields) if issubclass(cls, BaseModel) else set()


def _of_call(name: str, theirs: Callable[..., Any], ours: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """Calls that ``theirs`` accepts and ``ours`` does not, or takes differently, by parameter."""
    expected, found = _parameters(theirs), _parameters(ours)
    if expected is None or found is None:  # native code without a signature
        return
    position = 0
    for each in expected.values():
        problem = _problem(each, found, position)
        position += each.kind in _POSITIONAL
        if problem and not each.name.startswith("_"):
            yield f"{name}({each.name})", problem
    for each in found.values():
        needed = each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        known = each.name in expected or each.kind is each.POSITIONAL_ONLY
        if needed and not known and len(found) > len(expected):
            yield f"{name}({each.name})", "required here only"


def _problem(theirs: inspect.Parameter, found: Mapping[str, inspect.Parameter], position: int) -> str:
    if theirs.kind in (theirs.VAR_POSITIONAL, theirs.VAR_KEYWORD):
        return "" if any(each.kind is theirs.kind for each in found.values()) else "missing"
    positional = [each.name for each in found.values() if each.kind in _POSITIONAL]
    if theirs.kind is theirs.POSITIONAL_ONLY:
        return "" if position < len(positional) else "missing"
    ours = found.get(theirs.name)
    if ours is None:
        return "missing"
    if theirs.kind is theirs.POSITIONAL_OR_KEYWORD:
        if ours.kind is not ours.POSITIONAL_OR_KEYWORD:
            return str(ours.kind.description)
        if positional.index(theirs.name) != position:
            return f"at position {positional.index(theirs.name)}, not {position}"
    return "" if repr(theirs.default) == repr(ours.default) else f"default {ours.default!r}, not {theirs.default!r}"


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    try:
        named = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return {name: each for name, each in named.items() if name not in ("self", "cls")}


def _resolve(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
