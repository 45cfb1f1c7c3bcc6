"""Torch tensors as arguments: their memory travels as a buffer of its own and becomes a tensor again in place.

Only plain tensors in main memory that need no gradient; others are pickled as torch does it. torch is never
imported here: a tensor exists only where it already is.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import pickle
import sys
from typing import Any

from meshgate.far_names import Deferred, deferred_call

__all__ = ["reduce_tensor"]

MINIMUM = 4096  # below, torch's own way is as good


def reduce_tensor(value: Any) -> tuple[Any, ...] | None:
    """How to rebuild ``value`` with torch alone, or None where torch's own way must do.

    Two tensors that share memory arrive as two that do not.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor or not _plain(torch, value):
        return None
    value = value.contiguous()
    nbytes = value.numel() * value.element_size()
    if nbytes < MINIMUM:
        return None
    memory = (ctypes.c_char * nbytes).from_address(value.data_ptr())
    memory.tensor = value  # keeps the memory while the pickler copies it
    flat = Deferred(functools.partial(torch.frombuffer, dtype=value.dtype), pickle.PickleBuffer(memory))
    return deferred_call(operator.methodcaller("reshape", tuple(value.shape)), flat)


def _plain(torch: Any, value: Any) -> bool:
    return bool(
        value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.requires_grad
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and not value.__dict__
    )
