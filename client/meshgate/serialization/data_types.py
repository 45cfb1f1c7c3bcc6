"""The names that a result may contain if the laptop reads data only (``MESHGATE_RESULTS=data``).

A pickle can call whatever it can name. Nothing listed here runs code that the pickle brings, imports a module that the
pickle chooses, or reads or writes files.
"""

from __future__ import annotations

import builtins

_NAMES: dict[str, frozenset[str]] = {
    "builtins": frozenset(
        {"bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "range", "set", "slice"}
        | {"str", "tuple"}
    ),
    "_codecs": frozenset({"encode"}),  # how older pickle protocols write bytes
    "collections": frozenset({"Counter", "OrderedDict", "defaultdict", "deque"}),
    "datetime": frozenset({"date", "datetime", "time", "timedelta", "timezone"}),
    "decimal": frozenset({"Decimal"}),
    "fractions": frozenset({"Fraction"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath", "PureWindowsPath"}),
    "uuid": frozenset({"UUID"}),
    "numpy": frozenset({"dtype", "ndarray"}),
    "torch": frozenset(
        {"Size", "device", "bfloat16", "bool", "complex64", "complex128", "float16", "float32", "float64"}
        | {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    ),
    "torch._utils": frozenset({"_rebuild_parameter", "_rebuild_tensor_v2"}),
}
for _version in ("core", "_core"):  # numpy 1 and numpy 2
    _NAMES[f"numpy.{_version}.multiarray"] = frozenset({"_reconstruct", "scalar"})
    _NAMES[f"numpy.{_version}.numeric"] = frozenset({"_frombuffer"})


def is_data_type(module: str, name: str) -> bool:
    """Whether a result may contain ``module.name``: a type that holds data, its constructor, or a built-in error."""
    if name in _NAMES.get(module, ()):
        return True
    value = getattr(builtins, name, None) if module == "builtins" else None
    return isinstance(value, type) and issubclass(value, Exception)
