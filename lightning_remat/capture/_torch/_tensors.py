"""The tensors in nested containers and objects, copies of tensors, and changes of them.

``Tensor._version``: what counts writes to a tensor, or to another one with the same memory. ``Tensor._base``: the tensor that
a view is of.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """All tensors in nested containers, and in the attributes of objects such as a batch class of the user's own.

    Modules are left out, and an object that is reached a second time is not looked into again.
    """
    found: list[torch.Tensor] = []
    seen: set[int] = set()

    def collect(tree: Any, depth: int) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                found.append(leaf)
            elif depth < _DEEPEST and id(leaf) not in seen and not isinstance(leaf, _NO_BATCH):
                seen.add(id(leaf))
                collect(_attributes(leaf), depth + 1)

    collect(tree, 0)
    return found


def _attributes(value: Any) -> list[Any]:
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = {name for own in slots for name in ((own,) if isinstance(own, str) else own)} - {"__dict__", "__weakref__"}
    return [*(getattr(value, name, None) for name in sorted(names)), *getattr(value, "__dict__", {}).values()]


_NO_BATCH = (type, types.ModuleType, types.FunctionType, torch.nn.Module)

_DEEPEST = 4
"""How deep objects may lie inside of objects: a batch of graphs has its tensors in a mapping in a store."""


def copied(value: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, those of an expanded tensor too."""
    with torch.no_grad():
        once = value
        for dim, stride in enumerate(value.stride()):
            if stride == 0:
                once = once.narrow(dim, 0, min(1, once.size(dim)))
        copy = torch.empty_strided(once.shape, once.stride(), dtype=value.dtype, device=value.device)
        return copy.copy_(once).expand(value.shape)


class Remembered:
    """A tensor that is not kept alive: called, it is the tensor, or ``None`` once that is gone.

    A view that autograd knows nothing of (a part of a batch) is made again as long as the tensor is there that it is of.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._itself, self._whole = weakref.ref(tensor), None
        whole = tensor._base
        if whole is None or tensor.requires_grad or type(tensor) is not torch.Tensor or type(whole) is not torch.Tensor:
            return
        if tensor.dtype == whole.dtype and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg()):
            self._whole, self._place = weakref.ref(whole), (tensor.shape, tensor.stride(), tensor.storage_offset())

    def __call__(self) -> torch.Tensor | None:
        if (itself := self._itself()) is not None or self._whole is None or (whole := self._whole()) is None:
            return itself
        return whole.detach().as_strided(*self._place)


def changed_since(tensor: torch.Tensor) -> Callable[[], bool]:
    """A function that says whether a tensor has been written to since; it keeps none of its memory."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # which leaves the count as it is
    version = counter._version
    return lambda: counter._version != version


def address_of(value: Any) -> int | None:
    """The address of a plain tensor's or parameter's memory; ``None`` for anything else, and where there is none."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return None
    return value.untyped_storage().data_ptr() or None
