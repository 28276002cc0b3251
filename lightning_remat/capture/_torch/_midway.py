"""What a captured graph has set in torch when its trace ends in the middle: it is set back, or the graph is told of.

A graph of Dynamo's sets what holds for the ops after it (``torch.no_grad``, ``torch.autocast``, ``torch.func.vmap``), and sets
it back further on, which is not reached where an op in between fails.

* ``_functorch``: how many functions of ``torch.func`` are open, and what ends them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload

_SET_BACK = {
    *("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_vmap_increment_nesting", "_vmap_decrement_nesting"),
    *("is_grad_enabled", "lazy_load_decompositions", "_log_api_usage_once"),  # these set nothing that an op goes by
}


def sets_more(module: torch.fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's, or one in it, sets something else than what `set_back` knows of."""
    graphs = [one.graph for one in module.modules() if isinstance(one, torch.fx.GraphModule)]
    return any(_sets(node) and _name(node) not in _SET_BACK for graph in graphs for node in graph.nodes)


def _sets(node: torch.fx.Node) -> bool:
    """Whether it is a call of something else than an op, which neither gives nor reads what Dynamo has an example of."""
    if node.op != "call_function" or isinstance(node.target, OpOverload):
        return False
    return not any("example_value" in one.meta for one in (node, *node.all_input_nodes))


def _name(node: torch.fx.Node) -> str:
    return getattr(node.target, "__name__", "")


@contextlib.contextmanager
def set_back(kinds: Sequence[str] = ("cpu", "cuda")) -> Iterator[None]:
    """If what runs inside fails, gradients, autocast and ``torch.func.vmap`` are as they were.

    Args:
        kinds: types of devices that may have a region of autocast.
    """
    functorch: Any = torch._C._functorch
    levels = functorch.get_dynamic_layer_stack_depth()
    gradients, cached, regions = torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), _autocast_regions()
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    try:
        yield
    except BaseException:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(levels)
        torch.set_grad_enabled(gradients)
        for kind, enabled, dtype in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cached)
        while _autocast_regions() > regions:
            torch.autocast_decrement_nesting()
        if not regions:
            torch.clear_autocast_cache()
        raise


def _autocast_regions() -> int:
    """How many regions of autocast are open."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
