"""Regions under ``torch.utils.checkpoint`` are planned as all else, or refused where eager's second evaluation matters.

Traced, a checkpoint is a mark on its ops, and rematerialization chooses anew what is evaluated again. Where eager mode's second
evaluation changes something once more, or draws other numbers, that would be other training: such a step is refused,
and runs as before.
"""

from __future__ import annotations

import torch
import torch.fx

from lightning_remat.capture import _effects, _ops
from lightning_remat.capture._nodes import new_values
from lightning_remat.errors import CaptureError

aten = torch.ops.aten

_checkpoint = torch.ops.higher_order.tag_activation_checkpoint


def checkpoints(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The calls of ``torch.utils.checkpoint`` in what Dynamo has captured, those inside of others too."""
    graphs = [one.graph for one in module.modules() if isinstance(one, torch.fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes if node.target is _checkpoint]


def refuse_other_second_evaluations(graph: torch.fx.Graph, draws_anew: bool) -> None:
    """Refuse a joint graph in whose checkpoints eager mode's second evaluation does something else.

    Args:
        graph: the joint graph, as AOTAutograd hands it over.
        draws_anew: whether there are checkpoints with ``preserve_rng_state=False``.

    Raises:
        CaptureError: for batch norm, whose running statistics move with each evaluation, for other buffers that are written to
            (counters), for random numbers that are drawn anew, and for what is called for its effect, checks and messages
            excepted (see `tells`).
    """
    again = dict.fromkeys(node for node in graph.nodes if node.op == "call_function" and _is_evaluated_again(node))
    for node in again:
        if _moves_statistics(node):
            raise CaptureError(
                f"{node.name} is a batch norm inside of torch.utils.checkpoint, where eager mode moves its running statistics "
                "twice a step; take it out of the checkpoint, or the checkpoint away (what is evaluated again is planned)"
            )
        if _effects.tells(node):
            raise CaptureError(
                f"{node.name} is called inside of torch.utils.checkpoint for what it does, twice a step in eager mode; take it "
                "out of the checkpoint, or the checkpoint away (what is evaluated again is planned)"
            )
        if draws_anew and _ops.is_random(node.target):
            raise CaptureError(
                f"{node.name} draws random numbers inside of torch.utils.checkpoint(preserve_rng_state=False), other ones in "
                "eager mode's second evaluation; set preserve_rng_state=True, or take the checkpoint away (what is evaluated "
                "again is planned)"
            )
    for value, written in new_values(graph, graph.output_node().args[0]) if again else ():  # type: ignore[arg-type]
        if again.keys() & _between(written, value):
            raise CaptureError(
                f"{written.name} is written to inside of torch.utils.checkpoint, twice a step in eager mode; write to it "
                "outside, or take the checkpoint away (what is evaluated again is planned)"
            )


def _between(first: torch.fx.Node, last: torch.fx.Node) -> set[torch.fx.Node]:
    """The nodes that one follows from and that follow from the other: an input's values, among others, as it is written to."""
    following, leading = {first}, {last}
    for node in first.graph.nodes:
        if not following.isdisjoint(node.all_input_nodes):
            following.add(node)
    for node in reversed(first.graph.nodes):
        if node in leading:
            leading.update(node.all_input_nodes)
    return following & leading


def _is_evaluated_again(node: torch.fx.Node) -> bool:
    return "RECOMPUTE" in getattr(node.meta.get("recompute"), "name", "")


def _moves_statistics(node: torch.fx.Node) -> bool:
    """Whether a node is a batch norm in training mode with running statistics, or cuDNN's as traced (`call_cudnn`)."""
    if node.target is aten._batch_norm_with_update_functional.default:
        return True
    return node.target is aten._native_batch_norm_legit_functional.default and bool(node.args[5])
