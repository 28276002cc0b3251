"""One call of an op as eager mode makes it: on a device's kernel, below autograd, or observed.

* ``TorchDispatchMode`` and an op's kernel for one device: a kernel's result on memory that is given to it; and what eager mode
  runs, op by op, with the number of each in autograd's graph: by it an op of a backward is known to be that of a forward.
* ``_AutoDispatchBelowAutograd``: oneDNN's LSTM asks whether gradients are enabled (see ``_decompositions``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class _GivenMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While a kernel runs: whatever it allocates in the likeness of ``like`` is one and the same tensor.

    Attributes:
        memory: that tensor: the one given, or else the first that is allocated.
    """

    def __init__(self, like: torch.Tensor, memory: torch.Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.like, self.memory = like, memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        del types
        alike = func is torch.ops.aten.empty_like.default and args[0] is self.like
        if alike and self.memory is not None:
            return self.memory
        result = func(*args, **(kwargs or {}))
        if alike:
            self.memory = result
        return result


_CPU = DispatchKeySet(DispatchKey.CPU)


def run_on_cpu(op: OpOverload, args: tuple[Any, ...], *, like: torch.Tensor, memory: torch.Tensor | None) -> Any:
    """Call an op's kernel for the CPU. All that it allocates in the likeness of ``like`` is ``memory``, where that is given,
    and one tensor in any case.
    """
    with _GivenMemory(like, memory):
        return op.redispatch(_CPU, *args)


def run_below_autograd(op: OpOverload, *args: Any, gradients: bool) -> Any:
    """Call an op whose kernel asks whether gradients are enabled; autograd does not see it in any case."""
    with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(gradients):
        return op(*args)


ObserveOp = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], int, Callable[[], Any]], Any]
"""Given an op, its arguments, the number of the node of autograd's graph that runs it or was made for it last, and what runs
it: runs it, and returns its result.
"""


class _ObservedOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, observe: ObserveOp) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observe = observe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        node: Any = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else torch._C._autograd._get_sequence_nr() - 1
        kwargs = kwargs or {}
        return self._observe(func, args, kwargs, number, functools.partial(func, *args, **kwargs))


def observed_ops(observe: ObserveOp) -> contextlib.AbstractContextManager[Any]:
    """Every op that eager mode runs meanwhile, forward or backward, is run through ``observe``."""
    return _ObservedOps(observe)
