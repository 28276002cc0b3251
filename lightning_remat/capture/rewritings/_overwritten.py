"""Ops that read an input which the step overwrites read a copy of it, made first and never again.

AOTAutograd writes the new value back when the forward ends; whatever is evaluated after that must see the old one.
Batch norm is excepted: it can be evaluated again without its running statistics. An op whose result the forward only returns,
such as the next value itself, is excepted too, and evaluated once.
"""

from __future__ import annotations

import torch
import torch.fx

from lightning_remat.capture import _ops
from lightning_remat.capture._nodes import is_tensor, new_values

aten = torch.ops.aten


def clone_overwritten_inputs(graph: torch.fx.Graph, num_fwd_outputs: int) -> None:
    """Give a copy of each overwritten input to the ops that read it."""
    first = next(n for n in graph.nodes if n.op != "placeholder")
    output = graph.output_node()
    forward_outputs = tuple(output.args[0])[:num_fwd_outputs]  # type: ignore[arg-type]
    for node in dict.fromkeys(primal for _value, primal in new_values(graph, forward_outputs)):
        if not is_tensor(node):
            continue
        readers = [
            user
            for user in node.users
            if user is not output and not (_ops.training_batch_norm(user.target, user.args) and node in user.args[3:5])
        ]
        only_returned = [user for user in readers if set(user.users) == {output} and user in forward_outputs]
        for user in only_returned:  # such as a counter's next value: the backward never asks for it
            user.meta["remat_once"] = True
        readers = [user for user in readers if user not in only_returned]
        if not readers:
            continue
        with graph.inserting_before(first):
            copy = graph.call_function(aten.clone.default, (node,))
        copy.meta = dict(node.meta)
        copy.meta["remat_once"] = True
        for user in readers:
            user.replace_input_with(node, copy)
