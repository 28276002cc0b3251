"""Single calls of ops: by the CPU's kernel with given memory, below autograd, or observed as eager mode makes them.

* ``TorchDispatchMode`` and ``OpOverload.redispatch``: a kernel writes its result to memory that is given to it.
* ``TorchDispatchMode`` and sequence numbers: what eager mode runs, op by op, with the number of each in autograd's
  graph, by which an op of a backward is known to belong to one of the forward.
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
    """While a kernel runs: every ``empty_like`` of the tensor ``like`` that it calls gives one and the same tensor.

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
    """Call an op's kernel for the CPU, and give it memory for what it allocates by ``empty_like`` of one argument.

    Args:
        op: the op.
        args: its arguments.
        like: that argument.
        memory: what each such allocation gives; ``None``: what the first one gives.
    """
    with _GivenMemory(like, memory):
        return op.redispatch(_CPU, *args)


def run_below_autograd(op: OpOverload, *args: Any, gradients: bool) -> Any:
    """Call an op whose kernel asks whether gradients are enabled: ``gradients`` says so. Autograd records nothing."""
    with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(gradients):
        return op(*args)


ObserveOp = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], int, Callable[[], Any]], Any]
"""Given an op, its arguments, the number of the node of autograd's graph that runs it or was made for it last, and what runs
it: runs it, and returns its result.
"""


class _ObservedOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each op through ``observe``."""

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
    """While open, every op that eager mode runs, forward or backward, is run through ``observe``."""
    return _ObservedOps(observe)
