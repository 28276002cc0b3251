"""Batch norm: cuDNN's kernels where eager runs them, and a backward that keeps and allocates less.

* Batch norm that was traced for cuDNN's becomes that, forward and backward: torch's op would choose a kernel once more.
* In training mode the backward takes the running statistics and does not read them: it is given none.
* On the CPU, the backward allocates one result instead of two, or none, by the same kernel (see `batch_norm_backward`).
"""

from __future__ import annotations

import torch
import torch.fx

from lightning_remat.capture import _ops, _overwriting
from lightning_remat.capture import _torch as internals
from lightning_remat.capture._call import TensorSpec

aten = torch.ops.aten
Node = torch.fx.Node

_TRACED_FOR_CUDNN = (aten._batch_norm_with_update_functional.default, aten.batch_norm_backward.default)

SMALL_BATCH_NORM = 8
"""A batch norm is small where its input has less than the largest one's bytes divided by this."""


def call_cudnn(graph: torch.fx.Graph) -> None:
    """Batch norm that was traced for cuDNN's becomes that, forward and backward: torch's op would choose once more.

    The backward is given no running statistics, which it does not read. It computes all gradients, asked for or not.
    """
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _TRACED_FOR_CUDNN:
            continue
        if not internals.calls_cudnn(node.args[0].meta["val"]):
            continue
        if node.target is aten.batch_norm_backward.default:
            grad, x, weight, _, _, mean, invstd, _, eps, _, reserve = node.args
            node.target = aten.cudnn_batch_norm_backward.default
            node.args = (x, grad, weight, None, None, mean, invstd, eps, reserve)
        else:
            *given, momentum, eps = node.args
            node.target, node.args = _ops.cudnn_batch_norm, (*given, True, momentum, eps)


def free_running_statistics(graph: torch.fx.Graph) -> None:
    """In training mode the backward is given no running statistics."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is aten.native_batch_norm_backward.default and node.args[7]:
            node.update_arg(3, None)
            node.update_arg(4, None)


def give_batch_norm_memory(graph: torch.fx.Graph) -> None:
    """On the CPU, the backward of batch norm allocates one result instead of two, or none (see `batch_norm_backward`).

    Those of small tensors stay as they are: the other call takes longer, and they do not make the peak.
    """
    found: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is aten.native_batch_norm_backward.default and node.args[9][0]:
            grad, x = (TensorSpec.of(one.meta["val"], internals.hint) for one in node.args[:2])
            weight = node.args[2] and node.args[2].meta["val"].dtype
            if _overwriting.writes_where_told(grad, x, weight):
                found[node] = x.nbytes
    largest = max(found.values(), default=0)
    for node, nbytes in found.items():
        if nbytes * SMALL_BATCH_NORM >= largest:
            node.target = _overwriting.batch_norm_backward
