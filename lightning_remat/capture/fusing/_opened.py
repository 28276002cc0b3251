"""Layer norm and batch norm as the ops that they are made of, for runs that need not have eager's numbers: these are fused with
what is around.

Half precision is computed in single precision, as torch's kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from lightning_remat.capture import _ops
from lightning_remat.capture._torch import real_tensors
from lightning_remat.capture.fusing._rules import HALVES, is_left

aten = torch.ops.aten
Node = torch.fx.Node


def open_norms(graph: torch.fx.Graph) -> None:
    """Put ops of one result each in the place of layer norms, batch norms and their gradients."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _OPENED:
            continue
        with graph.inserting_before(node):
            made = _OPENED[node.target](_Writer(node), *node.args)
        if made is None:
            continue
        for item in list(node.users):
            item.replace_all_uses_with(made[item.args[1]])
            graph.erase_node(item)
        graph.erase_node(node)


class _Writer:
    """Writes ops in the place of another one, with its notes.

    Args:
        node: that one.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.meta = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta", "from_node")}
        self.dtypes = [one if one is None else one.dtype for one in node.meta["val"]]

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """The node of an op."""
        made = self.node.graph.call_function(op, args, kwargs)
        with real_tensors():
            made.meta = {**self.meta, "val": op(*torch.fx.node.map_arg(args, lambda one: one.meta["val"]), **kwargs)}
        return made

    def last(self, op: Any, *args: Any) -> Node:
        """The node of an op that runs once, behind all others where nothing reads the last two results of what is opened.

        (When the forward has ended, what it reads may be there no longer; and what else reads a run's results ends the run.)
        """
        graph, first = self.node.graph, len(self.dtypes) - 2
        readers = {user for item in self.node.users if item.args[1] >= first for user in item.users}  # type: ignore[operator]
        with graph.inserting_before(graph.output_node() if readers <= {graph.output_node()} else self.node):
            made = self(op, *args)
        made.meta.pop("nn_module_stack", None)  # the forward's last module does not end with it
        made.meta["remat_once"] = True
        return made

    def single(self, node: Node) -> Node:
        """A tensor in the precision that is computed in."""
        return self.cast(node, torch.float32) if node.meta["val"].dtype in HALVES else node

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """A tensor in a dtype."""
        return node if node.meta["val"].dtype == dtype else self(aten._to_copy.default, node, dtype=dtype)

    def results(self, *made: Node | None) -> list[Node | None]:
        """The op's results, in its dtypes."""
        pairs = zip(made, self.dtypes, strict=True)
        return [None if one is None or dtype is None else self.cast(one, dtype) for one, dtype in pairs]


def _forward(
    write: _Writer, x: Node, shape: Sequence[int], weight: Node | None, bias: Node | None, eps: float
) -> list[Node | None]:
    dims, x = [*range(-len(shape), 0)], write.single(x)
    mean = write(aten.mean.dim, x, dims, True)
    less = write(aten.sub.Tensor, x, mean)
    variance = write(aten.mean.dim, write(aten.mul.Tensor, less, less), dims, True)
    rstd = write(aten.rsqrt.default, write(aten.add.Tensor, variance, eps))
    result = write(aten.mul.Tensor, less, rstd)
    if weight is not None:
        result = write(aten.mul.Tensor, result, write.single(weight))
    if bias is not None:
        result = write(aten.add.Tensor, result, write.single(bias))
    return write.results(result, mean, rstd)


def _backward(
    write: _Writer,
    grad: Node,
    x: Node,
    shape: Sequence[int],
    mean: Node,
    rstd: Node,
    weight: Node | None,
    _bias: Node | None,
    wanted: Sequence[bool],
) -> list[Node | None]:
    dims, rows = [*range(-len(shape), 0)], [*range(x.meta["val"].dim() - len(shape))]
    grad, x, mean, rstd = map(write.single, (grad, x, mean, rstd))
    normal = write(aten.mul.Tensor, write(aten.sub.Tensor, x, mean), rstd)
    found: list[Node | None] = [None, None, None]
    if wanted[0]:
        scaled = grad if weight is None else write(aten.mul.Tensor, grad, write.single(weight))
        along = write(aten.mean.dim, write(aten.mul.Tensor, scaled, normal), dims, True)
        less = write(aten.sub.Tensor, scaled, write(aten.mean.dim, scaled, dims, True))
        found[0] = write(aten.mul.Tensor, write(aten.sub.Tensor, less, write(aten.mul.Tensor, normal, along)), rstd)
    if wanted[1]:
        product = write(aten.mul.Tensor, grad, normal)
        found[1] = write(aten.sum.dim_IntList, product, rows) if rows else product
    if wanted[2]:
        found[2] = write(aten.sum.dim_IntList, grad, rows) if rows else grad
    return write.results(*found)


def _batch_forward(
    write: _Writer,
    x: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node,
    running_var: Node,
    training: bool,
    momentum: float,
    eps: float,
) -> list[Node | None] | None:
    """Results: of the norm, the batch's mean and inverse deviation, and new running statistics."""
    if not training or not _is_opened(x):
        return None
    dims, channels = _of_channels(x)
    single = write.single(x)
    mean, variance = write(aten.mean.dim, single, dims), write(aten.var.correction, single, dims, correction=0)
    rstd = write(aten.rsqrt.default, write(aten.add.Tensor, variance, eps))
    less = write(aten.sub.Tensor, single, write(aten.view.default, mean, channels))
    result = write(aten.mul.Tensor, less, write(aten.view.default, rstd, channels))
    if weight is not None:
        result = write(aten.mul.Tensor, result, write.single(write(aten.view.default, weight, channels)))
    if bias is not None:
        result = write(aten.add.Tensor, result, write.single(write(aten.view.default, bias, channels)))
    count = x.meta["val"].numel() // x.meta["val"].shape[1]
    unbiased = write(aten.mul.Tensor, variance, count / max(count - 1, 1))
    statistics = zip((running_mean, running_var), (mean, unbiased), write.dtypes[-2:], strict=True)
    news = [write.last(next_statistic, old, new, momentum, dtype) for old, new, dtype in statistics]
    if len(write.dtypes) == _CUDNN_RESULTS:  # its reserve space is read by the gradient alone, which is opened too
        none = write(aten.empty.memory_format, [0], dtype=torch.uint8, device=x.meta["val"].device)
        return write.results(result, mean, rstd, none, *news)
    return write.results(result, mean, rstd, *news)


def next_statistic(old: torch.Tensor, new: torch.Tensor, momentum: float, dtype: torch.dtype) -> torch.Tensor:
    """A running statistic after a batch with the statistic ``new``, which is in single precision or more."""
    return old.to(new.dtype).lerp(new, momentum).to(dtype)


_CUDNN_RESULTS = 6


def _batch_backward(
    write: _Writer,
    grad: Node,
    x: Node,
    weight: Node | None,
    _running_mean: Node | None,
    _running_var: Node | None,
    mean: Node,
    rstd: Node,
    training: bool,
    _eps: float,
    wanted: Sequence[bool],
) -> list[Node | None] | None:
    if not training or not _is_opened(x):
        return None
    dims, channels = _of_channels(x)
    share = x.meta["val"].shape[1] / x.meta["val"].numel()
    grad, x = write.single(grad), write.single(x)
    mean, rstd = write.single(mean), write.single(rstd)
    less = write(aten.sub.Tensor, x, write(aten.view.default, mean, channels))
    total = write(aten.sum.dim_IntList, grad, dims)
    along = write(aten.mul.Tensor, write(aten.sum.dim_IntList, write(aten.mul.Tensor, grad, less), dims), rstd)
    if wanted[0]:
        part, scale = write(aten.mul.Tensor, write(aten.mul.Tensor, along, rstd), share), rstd
        if weight is not None:
            scale = write(aten.mul.Tensor, rstd, write.single(weight))
        each = write(aten.view.default, write(aten.mul.Tensor, total, share), channels)
        rest = write(
            aten.sub.Tensor,
            write(aten.sub.Tensor, grad, each),
            write(aten.mul.Tensor, less, write(aten.view.default, part, channels)),
        )
        gradient = write(aten.mul.Tensor, rest, write(aten.view.default, scale, channels))
    return write.results(gradient if wanted[0] else None, along if wanted[1] else None, total if wanted[2] else None)


def _cudnn_backward(
    write: _Writer,
    x: Node,
    grad: Node,
    weight: Node,
    _mean: None,
    _var: None,
    mean: Node,
    rstd: Node,
    eps: float,
    _reserve: Node,
) -> list[Node | None] | None:
    return _batch_backward(write, grad, x, weight, None, None, mean, rstd, True, eps, (True, True, True))


def _of_channels(x: Node) -> tuple[list[int], list[int]]:
    """The dimensions that a batch norm sums over, and the shape of what there is one of for each channel."""
    shape = x.meta["val"].shape
    return [i for i in range(len(shape)) if i != 1], [size if i == 1 else 1 for i, size in enumerate(shape)]


def _is_opened(x: Node) -> bool:
    """Whether a batch norm of such a tensor is written as other ops."""
    return not is_left(x) and all(type(size) is int and size > 0 for size in x.meta["val"].shape)


_OPENED: dict[Any, Callable[..., list[Node | None] | None]] = {
    aten.native_layer_norm.default: _forward,
    aten.native_layer_norm_backward.default: _backward,
    aten._native_batch_norm_legit_functional.default: _batch_forward,
    aten.native_batch_norm_backward.default: _batch_backward,
    _ops.cudnn_batch_norm: _batch_forward,
    aten.cudnn_batch_norm_backward.default: _cudnn_backward,
}
