"""Pickles torch tensors with their memory as an out-of-band buffer, from which the worker rebuilds them without a copy.

This applies to plain CPU tensors without gradients; torch pickles all others, such as nested tensors and expanded
views. This module does not import torch: a tensor exists only if torch has been imported.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import pickle
import sys
from typing import Any

from meshgate.serialization.worker_expressions import WorkerExpression, reduce_to_call

MIN_BYTES = 4096  # below this, torch's own pickling is as fast


def reduce_tensor(value: Any) -> tuple[Any, ...] | None:
    """A pickle reduction that needs only torch to rebuild ``value``, or None if torch must pickle it.

    Tensors that share memory no longer share it when they arrive, as a slice is sent without the rest of its tensor.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor or not _plain(torch, value):
        return None
    nbytes = value.numel() * value.element_size()
    if not MIN_BYTES <= nbytes <= value.untyped_storage().nbytes():  # larger than its memory: an expanded view
        return None
    value = value.contiguous()
    if not value.data_ptr():  # a tensor of zeros that autograd made without memory
        return None
    memory = (ctypes.c_char * nbytes).from_address(value.data_ptr())
    memory.tensor = value  # keeps the memory alive while the pickler copies it
    flat = WorkerExpression(functools.partial(torch.frombuffer, dtype=value.dtype), pickle.PickleBuffer(memory))
    return reduce_to_call(operator.methodcaller("reshape", tuple(value.shape)), flat)


def _plain(torch: Any, value: Any) -> bool:
    return bool(
        value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_nested
        and not value.requires_grad
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and not value.__dict__
    )
