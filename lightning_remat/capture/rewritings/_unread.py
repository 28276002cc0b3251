"""An op that reads only the shape of an input is given a stand-in without memory, and the values are not kept for it.

The gradient of a convolution's input depends on the gradient of its output and on the weights. torch's op takes the input
besides, for its shape and layout. Pooling and padding are likewise.
"""

from __future__ import annotations

import functools
import math
import mmap
import sys
import warnings

import torch
import torch.fx

from lightning_remat.capture._sizes import size_node, symbols_among

aten = torch.ops.aten

_SHAPE_ONLY = {
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
}
"""Ops that read the shape of their second argument only."""


def let_go_of_unread(graph: torch.fx.Graph) -> None:
    """Give a stand-in to the ops on the CPU that read the shape of an input only."""
    symbols = symbols_among(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or not _reads_shape_only(node):
            continue
        value = node.args[1].meta["val"]
        if not _available(value.device):
            continue
        with graph.inserting_before(node):
            sizes = (tuple(size_node(graph, n, symbols) for n in one) for one in (value.shape, value.stride()))
            other = graph.call_function(stand_in, (*sizes, value.dtype))
        other.meta["val"] = value
        node.update_arg(1, other)


def _reads_shape_only(node: torch.fx.Node) -> bool:
    """Whether the op reads nothing of its second argument but the shape and the strides."""
    if node.target is aten.convolution_backward.default:
        return list(node.args[10]) == [True, False, False]  # type: ignore[arg-type]
    return node.target in _SHAPE_ONLY


def _available(device: torch.device) -> bool:
    """Whether there are stand-ins for tensors on this device: on POSIX systems, pages take no memory until written."""
    return device.type == "cpu" and sys.platform != "win32"


@functools.lru_cache(maxsize=1024)
def stand_in(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros on the CPU that takes no memory: its pages are read-only, and have never been written."""
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0
    pages = _pages(max(1, span * dtype.itemsize - 1).bit_length())
    return pages.view(dtype).as_strided(shape, stride)


@functools.cache
def _pages(bits: int) -> torch.Tensor:
    """A tensor of at least ``2**bits`` bytes on such pages, which stand-ins share."""
    nbytes = max(1 << bits, mmap.PAGESIZE)
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # an op's input is not written
        return torch.frombuffer(region, dtype=torch.uint8)
