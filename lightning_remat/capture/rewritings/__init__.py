"""What is changed in a joint graph before it is read: `in_order` lists all changes, `rewrite` makes them.

A rewriting takes a graph and changes it in place, each node's ``meta["val"]`` with it, to one that gives the same bits.
Before all of them, who captures a step shares the casts that autocast shares (`share_casts`), and then looks for sums of
gradients: casts are among their summands.

What else the reader of the graph (``_joint``) has to know, it says in a node's ``meta``:

* ``remat_once``: the op is evaluated once a step, and its result kept as long as it is needed.
* ``remat_acts``: the op is called for its effect (see ``_effects``).
* ``remat_handed_over``: the op hands a gradient to a function of the caller's (see ``_gradients``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.fx

from lightning_remat.capture._effects import call_directly
from lightning_remat.capture._scatters import write_parts_alone
from lightning_remat.capture.packed._joint import call_packed
from lightning_remat.capture.rewritings._batch_norm import call_cudnn, free_running_statistics, give_batch_norm_memory
from lightning_remat.capture.rewritings._constants import constants_on_their_device
from lightning_remat.capture.rewritings._convolutions import split_convolution_backward
from lightning_remat.capture.rewritings._detach import drop_detach
from lightning_remat.capture.rewritings._dropout import split_dropout
from lightning_remat.capture.rewritings._extrema import leave_zeros_beside_extrema
from lightning_remat.capture.rewritings._filled import add_up_what_was_filled
from lightning_remat.capture.rewritings._gaps import leave_gaps
from lightning_remat.capture.rewritings._gradients import HandOver, hand_over_gradients
from lightning_remat.capture.rewritings._in_place import leave_in_place
from lightning_remat.capture.rewritings._losses import compact_losses
from lightning_remat.capture.rewritings._lstm import keep_lstm_kernels
from lightning_remat.capture.rewritings._overwritten import clone_overwritten_inputs
from lightning_remat.capture.rewritings._products import choose_gradients_of_products
from lightning_remat.capture.rewritings._symbols import sizes_from_symbols
from lightning_remat.capture.rewritings._unread import let_go_of_unread

__all__ = ["HandOver", "Rewriting", "in_order", "rewrite"]

Rewriting = Callable[[torch.fx.Graph], None]


def rewrite(graph: torch.fx.Graph, num_fwd_outputs: int, hand_over: HandOver) -> None:
    """Apply all rewritings to a joint graph.

    Args:
        graph: the joint graph, rewritten in place.
        num_fwd_outputs: how many of its outputs are the forward's.
        hand_over: what takes which gradients as soon as they are made.

    Raises:
        CaptureError: for a graph that cannot be rewritten to give eager's bits.
    """
    for rewriting in in_order(num_fwd_outputs, hand_over):
        rewriting(graph)


def in_order(num_fwd_outputs: int, hand_over: HandOver) -> tuple[Rewriting, ...]:
    """All rewritings, in the order in which they are applied; the arguments are those of `rewrite`."""
    return (
        call_directly,
        drop_detach,
        constants_on_their_device,
        sizes_from_symbols,
        choose_gradients_of_products,
        leave_zeros_beside_extrema,
        add_up_what_was_filled,
        split_dropout,
        split_convolution_backward,
        let_go_of_unread,  # of the two calls that a convolution's backward has become, one reads the shape only
        call_cudnn,
        keep_lstm_kernels,
        call_packed,
        write_parts_alone,
        free_running_statistics,
        give_batch_norm_memory,  # puts another function in the place of the op that `free_running_statistics` looks for
        compact_losses,
        # After whatever makes ops read less (stand-ins, parts that are written, statistics), and after cuDNN's batch norm has
        # the name by which it is excepted: it copies what is overwritten for all the ops that still read it.
        functools.partial(clone_overwritten_inputs, num_fwd_outputs=num_fwd_outputs),
        leave_in_place,
        leave_gaps,  # puts other functions, with more arguments, in the place of ops that those before look for, and copies
        # Last: where a gradient is handed over, the graph no longer returns it, and those before look at what it returns.
        functools.partial(hand_over_gradients, num_fwd_outputs=num_fwd_outputs, hand_over=hand_over),
    )
