"""How results of single calls really lie in memory, where measuring has found other strides than tracing says.

torch's fake tensors know the strides of its own kernels, but for those in ``_layouts``. They cannot know those of a kernel
that the device's own library chooses, and an op of the user's has what its ``register_fake`` says. A graph that is traced
with other strides than the results have computes in another form than eager mode does (a linear layer adds its bias in its
product or beside it, depending on how its input lies), or ends with a view that is none. So what `profile` finds is
remembered here, for this process, and the step is traced again by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from lightning_remat._recent import Recent
from lightning_remat.capture._call import OpCall, TensorSpec

Strides = tuple[int, ...]

_found: Recent[str, Mapping[int, Strides]] = Recent()
"""By `OpCall.key` without sources: strides by the place of a result among the call's outputs."""

_targets: set[Callable[..., Any]] = set()


def learn(calls: Iterable[OpCall | None], real_strides: Iterable[Sequence[tuple[int, Strides]]]) -> bool:
    """Remember the strides that were measured, and say whether any of them was not known.

    Args:
        calls: what was measured.
        real_strides: for each call, `OpCost.real_strides`.
    """
    new = False
    for call, strides in zip(calls, real_strides, strict=True):
        if call is None or not strides:
            continue
        key = dataclasses.replace(call, sources=()).key
        if _found.get(key) is None:
            _found[key] = dict(strides)
            _targets.add(call.target)
            new = True
    return new


def measured_strides(target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Mapping[int, Strides]:
    """The strides that were measured of what ``target(*args, **kwargs)`` returns, by place; none of symbolic sizes."""
    if target not in _targets:
        return {}
    call = OpCall(target, _described(tuple(args)), _described(dict(kwargs)), ())
    return _found.get(call.key) or {}


def _described(value: Any) -> Any:
    """An argument with specs in the place of tensors; a symbolic size stays one, and is none that was measured."""
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value, lambda n: n)
    if isinstance(value, (tuple, list)):
        parts = [_described(one) for one in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, dict):
        return {name: _described(one) for name, one in value.items()}
    return value
